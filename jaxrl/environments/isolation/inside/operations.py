"""Operations on an object, by name, that one process can ask of the other."""

from __future__ import annotations

import operator

TYPE_CHECKING = False  # importing typing takes time at every start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
FORWARDED = (
    *("call", "getitem", "setitem", "delitem", "iter", "next", "enter"),
    *("len", "bool", "str", "repr", "hash", "int", "float"),
)


def _enter(manager: Any) -> Any:
    return type(manager).__enter__(manager)


def _exit(manager: Any) -> Any:
    return type(manager).__exit__(manager, None, None, None)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": operator.call,
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "hash": hash,
    "int": int,
    "float": float,
    "enter": _enter,
    "exit": _exit,
    **{name: getattr(operator, f"__{name}__") for name in (*COMPARISONS, *ARITHMETIC)},
}
