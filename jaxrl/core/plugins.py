"""Lookup of functions named in a config: built-in ones by name, the user's by file or module."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jaxrl.core.names import nearest

T = TypeVar("T")

_loading = threading.RLock()  # files may load files


def load_function(reference: str, *, builtin: ModuleType | None, key: str) -> Callable[..., Any]:
    """Loads the function that a config names: a public function of `builtin`, if there are built-in
    ones, `path/to/file.py:function` or `package.module:function`.

    Raises:
      ValueError: if the file, module or function does not exist, or the name is not a function; the
        message gives the nearest name. An exception raised by the user's file is chained to it.
    """
    where, colon, name = reference.rpartition(":")
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise ValueError(f"{key} = {reference!r}: the file {where} does not exist")
    module = builtin
    if colon:
        try:
            module = _load_file(Path(where)) if is_file else importlib.import_module(where)
        except (Exception, SystemExit) as error:
            text = f"{key} = {reference!r}: importing {where} failed: {error!r}"
            raise ValueError(text) from error
    function = getattr(module, name, None)
    names = [] if module is None else _public_functions(module)
    if not callable(function) or (module is builtin and name not in names):
        near = nearest(name, names)
        hint = f"did you mean {near}?" if near else f"it has {', '.join(names) or 'none'}"
        fault = f"{where} has no function {name!r}; {hint}"
        if not colon:
            own = " To" if near else "; to"
            own += " name your own function, write file.py:function"
            fault = f"jaxrl has no {name!r} for this key{f'; {hint}' * bool(names)}{own}"
        raise ValueError(f"{key} = {reference!r}: {fault}")
    return function


def check_parameters(
    function: Callable[..., Any],
    parameters: Mapping[str, Any],
    *,
    key: str,
    also: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Checks the keys of the config table `key` against a function's parameters. The table may
    also contain the keys `also`. `renamed` maps names that other libraries use to parameters.

    Raises:
      ValueError: if the table has a key that is not a parameter, or lacks a parameter without a
        default; the message gives the key and the nearest parameter.
    """
    declared = declared_parameters(function, key=key)
    if any(p.kind is p.VAR_KEYWORD for p in declared.values()):
        return
    known = [*declared, *also]
    for name in parameters:
        if name not in known:
            other = (renamed or {}).get(name)
            near = other if other in known else nearest(name, known)
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"{key}.{name}: {function.__name__} has no such parameter; {hint}")
    required = [n for n, p in declared.items() if p.default is p.empty and n not in parameters]
    if required:
        raise ValueError(f"{key}.{required[0]} is missing: {function.__name__} needs it")


def declared_parameters(
    function: Callable[..., Any], *, key: str
) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of the function that the table `key` names, with annotations evaluated
    where possible; raises ValueError if Python does not know the parameters."""
    with contextlib.suppress(Exception):  # names that only a type checker imports
        return inspect.signature(function, eval_str=True).parameters
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # some functions in C
        raise ValueError(
            f"{key}.name: the parameters of {function} are unknown: {error}"
        ) from error


def naming_keys(
    make: Callable[[Mapping[str, Any]], T], parameters: Mapping[str, Any], *, key: str, name: str
) -> T:
    """Returns `make(parameters)` for the config table `key`, whose function is `name`.

    Raises:
      ValueError: if it fails. The message names the config's keys at fault: those without which the
        call would succeed. The function itself knows only its parameters.
    """
    try:
        return make(parameters)
    except (Exception, SystemExit) as error:
        known = isinstance(error, ValueError)
        if known and any(f"{key}.{parameter}" in str(error) for parameter in parameters):
            raise
        wrong = _at_fault(make, parameters)
        if known and not wrong:
            raise
        named, what = f"{key}.name = {name!r}", str(error) if known else repr(error)
        given = [named, *(f"{key}.{name} = {parameters[name]!r}" for name in wrong)]
        raise ValueError(f"{', '.join(given)}: {what.removeprefix(f'{named}: ')}") from error


def _at_fault(
    make: Callable[[Mapping[str, Any]], Any], parameters: Mapping[str, Any]
) -> Sequence[str]:
    def works(given: Mapping[str, Any]) -> bool:
        try:
            make(given)
        except (Exception, SystemExit):
            return False
        return True

    wrong = [
        name for name in parameters if works({k: v for k, v in parameters.items() if k != name})
    ]
    return wrong or (list(parameters) if works({}) else [])


def divide_parameters(
    function: Callable[..., Any],
    other: Callable[..., Any],
    parameters: Mapping[str, Any],
    *,
    key: str,
    renamed: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a config table into the arguments of `function` and the others, of `other`.

    Raises:
      ValueError: as `check_parameters`, if neither function takes a parameter.
    """
    declared = declared_parameters(function, key=key)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in declared.values())
    others = () if takes_all else inspect.signature(other).parameters
    theirs = [name for name in others if name not in declared]
    check_parameters(function, parameters, key=key, also=theirs, renamed=renamed)
    own = {name: value for name, value in parameters.items() if name not in theirs}
    return own, {name: value for name, value in parameters.items() if name in theirs}


def _load_file(path: Path) -> ModuleType:
    # A unique module name per file, so that each file is executed once.
    name = f"jaxrl_plugin_{path.resolve().as_posix()}"
    with _loading:  # another thread's half-executed module has not all functions
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look their module up here
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _public_functions(module: ModuleType) -> list[str]:
    """Lists the functions in a module's `__all__`; without it, those that the module defines."""
    listed = getattr(module, "__all__", None)
    return [
        name
        for name in (vars(module) if listed is None else listed)
        if inspect.isfunction(value := getattr(module, name, None))
        and (listed is not None or value.__module__ == module.__name__)
        and name[0] != "_"
    ]
