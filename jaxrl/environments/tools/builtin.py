"""Tools that a config names; the model reads their docstrings."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from jaxrl.environments.isolation.sandbox import run_python

Number = int | float

_MOST_CHARACTERS = 400  # of an expression; bounds the depth of its syntax tree too
_MOST_BITS = 8192  # of an integer, about 2,500 digits
_MOST_DIGITS = 400  # to round to; a float has at most 324


def _round(number: Number, *digits: int) -> Number:
    # Rounding an integer to -4000000 digits computes 10**4000000 and blocks all other threads.
    if any(abs(d) > _MOST_DIGITS for d in digits):
        raise ValueError(f"round takes at most {_MOST_DIGITS} digits")
    return round(number, *digits)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": _round,
    **{
        name: getattr(math, name)
        for name in ("ceil", "cos", "exp", "floor", "log", "log10", "log2", "sin", "sqrt", "tan")
    },
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression, such as (12 + 3.5) * 2**10 / sqrt(2)."""
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"the expression is longer than {_MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ValueError(f"not an expression: {error}") from None
    value = _value(tree.body)
    return str(value) if isinstance(value, int) else format(value, ".12g")


def python(code: str) -> str:
    """Runs a Python program without network for at most 5 seconds and returns what it prints."""
    ran = run_python(code)
    lines = [ran.stdout.strip()]
    if ran.timed_out:
        lines.append("Error: timeout")
    elif ran.status:
        lines.append(f"Error: {(ran.stderr.strip().splitlines() or [f'status {ran.status}'])[-1]}")
    return "\n".join(line for line in lines if line) or "(no output)"


def _value(node: ast.expr) -> Number:
    """Evaluates an expression; raises ValueError for anything but arithmetic on numbers, and if a
    number is too large."""
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > 0:
        # Checked before computing: 9**9**9 would take all memory.
        _check_bits(base.bit_length() * exponent)
    return _bounded(base**exponent)


def _bounded(value: Any) -> Number:
    if isinstance(value, int):
        _check_bits(value.bit_length())
    elif not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"the result is {value}, not a finite number")
    return value


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise ValueError("the result is too large")
