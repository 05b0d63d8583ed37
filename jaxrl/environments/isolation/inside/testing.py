"""The side of the tests: trusted code, in a process that never runs the code under test.

It reports on the control descriptor: P if the tests ran to their end, or U and a reason if they
pass something to the code that cannot go to another process.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import os
import sys
import types

from .peer import Peer
from .proxies import Proxy

TYPE_CHECKING = False  # importing typing takes time at every start
if TYPE_CHECKING:
    from typing import Any, NoReturn


def run_tests(source: bytes, pipes: list[int], control: int) -> NoReturn:
    """Runs the tests as the main program with the code's names, and ends the process."""
    try:
        tree = ast.parse(source)
        peer = _TestPeer(*pipes, control=control)
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        # Modules are imported here, because the code could hand out false ones.
        own, theirs = split_names(tree)
        for name in own:
            setattr(module, name, importlib.import_module(name))
        # A copy of the list, because an answer may change it. Only the requested names are taken:
        # the code's process could also offer its own `abs`.
        offered = peer.ask("names", [*theirs])
        vars(module).update((name, offered[name]) for name in theirs if name in offered)
        exec(compile(tree, "tests.py", "exec"), vars(module))
    except SystemExit as end:
        passed = end.code in (None, 0)
    except BaseException:
        passed = False
    else:
        passed = True
    if passed:
        os.write(control, b"P")
    os._exit(0)


def split_names(tree: ast.Module) -> tuple[list[str], list[str]]:
    """Returns names that tests use: modules of the standard library, and names of the code.

    Code could redefine `abs` or `math` to deceive its tests. So a built-in name is the code's only
    if the tests use no other name, as in `assert sum(10, 15) == 6`. If the tests use a module that
    only the code imports, they get the real one.
    """
    used, defined, called, bases = set[str](), set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(name)
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.alias(name=name, asname=alias):
                defined.add(alias or name.partition(".")[0])
            case ast.Attribute(value=ast.Name(id=name)):
                bases.add(name)
            case ast.Call(func=ast.Name(id=name)):
                called.add(name)
    modules = (used & bases & sys.stdlib_module_names) - called - defined
    unknown = used - defined - modules
    ordinary = used - modules - set(dir(builtins))
    theirs = ordinary | unknown if len(unknown) == 1 else ordinary
    return sorted(modules), sorted(theirs)


class _TestPeer(Peer):
    """Hands out functions to call, iterators and objects of the tests' own classes."""

    def __init__(self, receive: int, send: int, *, control: int) -> None:
        super().__init__(receive, send)
        self._control = control
        self._answering = 0

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        try:
            found = super().ask(operation, *arguments, **keywords)
        except (StopIteration, StopAsyncIteration) as stop:
            if operation == "next" and isinstance(stop, StopIteration):
                raise
            # It would end a loop of the tests, such as the one of `all(map(...))`, before a check.
            raise RuntimeError(f"the code raised {type(stop).__name__}") from None
        if operation == "names":
            for value in found.values():
                _check_class(value)
        if operation == "getattr":
            _check_class(found)
            if arguments[1] in ("send", "throw") and isinstance(found, Proxy):
                return functools.partial(super().ask, "call", found)  # as `next`, it may stop
        return found

    def refuse(self, reason: str) -> None:
        # The code must not be able to cause this outcome instead of a failure.
        if not self._answering:
            os.write(self._control, b"U" + reason.encode()[:200])
            os._exit(0)
        super().refuse(reason)

    def check_reference(self, value: Any) -> None:
        if not (callable(value) or _is_iterator(value) or _is_of_tests(value)):
            self.refuse(f"an object of {type(value)} cannot go to the code's process")

    def check_operation(self, operation: str, arguments: list[Any]) -> None:
        value, *rest = arguments
        # Only objects that the tests handed out, not copies that the code sent.
        if self._mine.get(id(value)) is not value:
            raise TypeError("it is not an object of the tests")
        if _is_of_tests(value):
            name = rest[0] if operation in ("getattr", "setattr", "delattr") else ""
            if not isinstance(name, str) or name.startswith("_") or operation == "names":
                raise AttributeError(name)
            if operation != "getattr" and callable(getattr(type(value), name, None)):
                raise AttributeError(f"{name} is a method")
        elif not (operation == "call" and callable(value)) and not (
            operation in ("next", "iter") and _is_iterator(value)
        ):
            raise TypeError(f"{operation} is refused")

    def describe(self, kind: type) -> list[Any]:
        # Without a reference to the class itself, which the code could call.
        names = [b.__name__ for b in kind.__mro__ if b.__module__ == "builtins"]
        return [id(kind), kind.__name__, names[: issubclass(kind, Exception)]]

    def _answer(self, message: list[Any]) -> None:
        self._answering += 1
        try:
            super()._answer(message)
        finally:
            self._answering -= 1


def _check_class(value: Any) -> None:
    """Raises TypeError for a class, or one in a tuple, that catches the tests' AssertionErrors."""
    for kind in value if isinstance(value, tuple) else (value,):
        if isinstance(kind, type) and kind is not object and issubclass(AssertionError, kind):
            raise TypeError(f"{kind.__name__} is not an exception of the code's own")


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")


def _is_of_tests(value: Any) -> bool:
    return type(value).__module__ == "__main__"
