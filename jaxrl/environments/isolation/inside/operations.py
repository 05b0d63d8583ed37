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


_FUNCTIONS: tuple[Any, ...] = (
    *(operator.call, operator.getitem, operator.setitem, operator.delitem),
    *(getattr, setattr, delattr, iter, next, len, bool, str, repr, hash, int, float),
)
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in _FUNCTIONS},
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    **{name: getattr(operator, f"__{name}__") for name in (*COMPARISONS, *ARITHMETIC)},
}
