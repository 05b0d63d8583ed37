"""Failures in words, with file, line and function of the user's code."""

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

_LIBRARY = [str(Path(__file__).parents[2]), *map(sysconfig.get_path, ("stdlib", "platstdlib"))]
_INSTALLED = ("site-packages", "dist-packages")


def describe(error: BaseException, *, function: Callable[..., Any]) -> str:
    """Words an exception as "my_rewards.py:12 in score: KeyError: 'x'": with the place where it was
    raised, or else that of `function`."""
    place, text = raised_at(error) or defined_at(function), str(error)
    return f"{place}{type(error).__name__}{': ' * bool(text)}{text}"


def raised_at(error: BaseException) -> str:
    """Returns the last line of the user's own code that an exception passed, as `defined_at` does.

    Code of jaxrl and of Python has no place, and code of an installed package has one only if the
    exception passed no other code.
    """
    frames = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
    theirs = [frame for frame in frames if _is_users(frame[0])]
    own = [frame for frame in theirs if not set(_INSTALLED) & set(_path(frame[0]).parts)]
    found = (own or theirs)[-1:]
    return _place(*found[0]) if found else ""


def defined_at(function: Callable[..., Any] | None) -> str:
    """Returns the place of a function of the user as "my_rewards.py:12 in score: ", else ""."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return _place(code, code.co_firstlineno) if code is not None and _is_users(code) else ""


def _is_users(code: CodeType) -> bool:
    name, path = code.co_filename, _path(code)
    within = any(path.is_relative_to(folder) for folder in _LIBRARY)
    return not name.startswith("<") and (not within or bool(set(_INSTALLED) & set(path.parts)))


def _path(code: CodeType) -> Path:
    return Path(code.co_filename).absolute()


def _place(code: CodeType, line: int) -> str:
    path = _path(code)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line} in {code.co_name}: "
