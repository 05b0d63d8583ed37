"""Operations of uploaded losses, by torch's names; derivatives at kinks and ties are torch's."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.service.uploaded.indexing import attribute, item, sizes, squeeze, unsqueeze
from jaxrl.service.uploaded.values import Dtype, Value, dims, entrywise, reduced, shown


class Operation(NamedTuple):
    """One operation.

    Attributes:
      function: takes tensors (`Value`), numbers and what else the graph has; None is an argument
        that is left out.
      parameters: torch's names, in torch's order.
      required: how many of them must be given.
    """

    function: Callable[..., Any]
    parameters: tuple[str, ...]
    required: int = 1


def _entries(function: Callable[..., Any], *parameters: str) -> Operation:
    names = parameters or ("input",)
    return Operation(functools.partial(entrywise, function), names, len(names))


_PAIR = ("input", "other")


def _two(function: Callable[..., Any]) -> Operation:
    return _entries(function, *_PAIR)


def _booleans(function: Callable[..., Any], *parameters: str) -> Operation:
    def checked(*arrays: Any) -> Any:
        for one in arrays:
            _check_booleans(one)
        return function(*arrays)

    return _entries(checked, *parameters)


def _check_booleans(array: Any) -> None:
    if getattr(array, "dtype", None) != jnp.bool_:
        raise ValueError("it takes booleans; compare with a number, such as mask != 0")


def _check_dtype(dtype: Any) -> None:
    if dtype not in (None, Dtype("float32")):
        raise ValueError(f"dtype = {dtype!r}: sums are float32 here")


def _where(condition: Any, chosen: Any, other: Any) -> Any:
    _check_booleans(condition)
    return jnp.where(condition, chosen, other)


def _masked_fill(array: Any, mask: Any, number: Any) -> Any:
    return _where(mask, number, array)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int) and abs(exponent) > 16:  # it would become many products
        exponent = float(exponent)
    return jnp.power(base, exponent)


def _clamp(value: Value, low: Any = None, high: Any = None) -> Value:
    # torch passes the derivative on at the bounds, and jnp.clip halves it.
    if low is not None:
        value = entrywise(lambda x, y: jnp.where(x < y, y, x), value, low)
    if high is not None:
        value = entrywise(lambda x, y: jnp.where(x > y, y, x), value, high)
    return value


def _softplus(x: Any) -> Any:
    return jnp.where(x > 20, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20))))  # as torch has it


def _gelu(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


def _reduction(function: Callable[..., Any], fill: Callable[[Any], Any]) -> Operation:
    def apply(value: Value, dim: Any = None, keepdim: Any = None, dtype: Any = None) -> Value:
        _check_dtype(dtype)
        axes, keep = dims(value, dim), bool(keepdim)
        array = value.filled(axes, fill(value.array.dtype))
        return reduced(value, axes, function(array, axis=axes, keepdims=keep), keepdim=keep)

    return Operation(apply, ("input", "dim", "keepdim", "dtype"))


def _lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(jnp.int32).min


def _highest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(jnp.int32).max


_SUM = _reduction(jnp.sum, lambda dtype: 0)
_LOGSUMEXP = _reduction(jax.nn.logsumexp, _lowest)


def _mean(value: Value, dim: Any = None, keepdim: Any = None, dtype: Any = None) -> Value:
    total: Value = _SUM.function(value, dim, keepdim, dtype)
    return total.like(total.array / value.size(dims(value, dim)))


def _var(
    value: Value, dim: Any = None, unbiased: Any = None, keepdim: Any = None, correction: Any = None
) -> Value:
    less = correction if correction is not None else 0 if unbiased is False else 1
    squares = value.like((value.array - _mean(value, dim, True).array) ** 2)
    total: Value = _SUM.function(squares, dim, keepdim)
    return total.like(total.array / jnp.maximum(value.size(dims(value, dim)) - less, 0))


def _std(*given: Any) -> Value:
    found = _var(*given)
    flat = found.array == 0  # there torch's derivative is 0
    return found.like(jnp.where(flat, 0, jnp.sqrt(jnp.where(flat, 1, found.array))))


def _log_softmax(value: Value, dim: Any, dtype: Any = None) -> Value:
    total = _LOGSUMEXP.function(value, dim, True, dtype)
    return value.like(value.array - total.array)


def _softmax(value: Value, dim: Any, dtype: Any = None) -> Value:
    found = _log_softmax(value, dim, dtype)
    return found.like(jnp.exp(found.array))


def _cumsum(value: Value, dim: Any, dtype: Any = None) -> Value:
    _check_dtype(dtype)
    for axis in dims(value, dim):
        value = value.like(jnp.cumsum(value.array, axis=axis)).padded(axis)
    return value


def _flip(value: Value, axes: Any) -> Value:
    for axis in dims(value, axes):
        last = value.length(axis) - 1
        value = value.taken(axis, jnp.maximum(last - jnp.arange(value.array.shape[axis]), 0))
    return value


def _extreme(name: str, pair: Callable[..., Any], reduction: Operation) -> Operation:
    def apply(value: Value, other: Any = None) -> Value:
        if isinstance(other, Value):
            return entrywise(pair, value, other)
        if other is not None:
            raise ValueError(f"with a dim it returns indices too; use a{name}")
        return reduction.function(value)

    return Operation(apply, ("input", "other"))


def _dot(one: Value, other: Value) -> Value:
    if len(one.axes) != 1 or len(other.axes) != 1:
        raise ValueError(f"shapes {shown([one, other])}: it takes two with one axis")
    return _SUM.function(entrywise(jnp.multiply, one, other))


def _difference(entry: Callable[..., Any], *more: str) -> Operation:
    """Makes a loss of torch.nn.functional from a function of the difference."""

    def apply(value: Any, target: Any, reduction: Any = None, *given: Any) -> Value:
        numbers = [1.0 if x is None else x for x in given] or [1.0] * len(more)
        found = entrywise(lambda x, y: entry(x - y, *numbers), value, target)
        if reduction == "none":
            return found
        if reduction not in (None, "mean", "sum"):
            raise ValueError(f"reduction = {reduction!r}; it must be 'none', 'mean' or 'sum'")
        return _SUM.function(found) if reduction == "sum" else _mean(found)

    return Operation(apply, ("input", "target", "reduction", *more), 2)


def _huber(x: Any, delta: float) -> Any:
    size = jnp.abs(x)
    return jnp.where(size < delta, 0.5 * x * x, delta * (size - 0.5 * delta))


def _smooth_l1(x: Any, beta: float) -> Any:
    size = jnp.abs(x)
    return jnp.where(size < beta, 0.5 * x * x / beta, size - 0.5 * beta)


def _converted(value: Value, dtype: Any) -> Value:
    kinds = {"float32": jnp.float32, "bool": jnp.bool_, "int64": jnp.int32, "int32": jnp.int32}
    if not isinstance(dtype, Dtype) or dtype not in kinds:
        raise ValueError(f"{dtype!r}: there are the dtypes {', '.join(kinds)}")
    return value.like(value.array.astype(kinds[dtype]))


def _to(dtype: str) -> Operation:
    return Operation(lambda value: _converted(value, Dtype(dtype)), ("input",))


_SAME = Operation(lambda value: value, ("input",))
_DETACHED = Operation(lambda value: value.like(jax.lax.stop_gradient(value.array)), ("input",))
_DIVIDED, _POWER = _two(jnp.divide), _entries(_power, "input", "exponent")
_CLAMP = Operation(_clamp, ("input", "min", "max"))
_AMAX, _AMIN = _reduction(jnp.max, _lowest), _reduction(jnp.min, _highest)
_SPREAD = ("input", "dim", "unbiased", "keepdim", "correction")
_BOTH, _EITHER = _booleans(jnp.logical_and, *_PAIR), _booleans(jnp.logical_or, *_PAIR)
_NOT, _OTHER = _booleans(jnp.logical_not, "input"), _booleans(jnp.logical_xor, *_PAIR)

OPERATIONS: Mapping[str, Operation] = {
    # Single entries.
    "abs": _entries(jnp.abs),
    "acos": _entries(jnp.arccos),
    "asin": _entries(jnp.arcsin),
    "atan": _entries(jnp.arctan),
    "ceil": _entries(jnp.ceil),
    "cos": _entries(jnp.cos),
    "cosh": _entries(jnp.cosh),
    "erf": _entries(jax.lax.erf),
    "exp": _entries(jnp.exp),
    "exp2": _entries(jnp.exp2),
    "expit": _entries(jax.nn.sigmoid),
    "expm1": _entries(jnp.expm1),
    "floor": _entries(jnp.floor),
    "gelu": _entries(_gelu),
    "isfinite": _entries(jnp.isfinite),
    "isinf": _entries(jnp.isinf),
    "isnan": _entries(jnp.isnan),
    "log": _entries(jnp.log),
    "log10": _entries(jnp.log10),
    "log1p": _entries(jnp.log1p),
    "log2": _entries(jnp.log2),
    "log_sigmoid": _entries(jax.nn.log_sigmoid),
    "neg": _entries(jnp.negative),
    "pos": _SAME,
    "reciprocal": _entries(jnp.reciprocal),
    "relu": _entries(jax.nn.relu),
    "round": _entries(jnp.round),
    "rsqrt": _entries(jax.lax.rsqrt),
    "sigmoid": _entries(jax.nn.sigmoid),
    "sign": _entries(jnp.sign),
    "silu": _entries(jax.nn.silu),
    "sin": _entries(jnp.sin),
    "sinh": _entries(jnp.sinh),
    "softplus": _entries(_softplus),
    "sqrt": _entries(jnp.sqrt),
    "square": _entries(jnp.square),
    "tan": _entries(jnp.tan),
    "tanh": _entries(jnp.tanh),
    "trunc": _entries(jnp.trunc),
    # Two or three of them.
    "add": _two(jnp.add),
    "clamp": _CLAMP,
    "clamp_max": Operation(lambda value, high: _clamp(value, None, high), ("input", "max"), 2),
    "clamp_min": Operation(_clamp, ("input", "min"), 2),
    "clip": _CLAMP,
    "div": _DIVIDED,
    "divide": _DIVIDED,
    "eq": _two(jnp.equal),
    "ge": _two(jnp.greater_equal),
    "gt": _two(jnp.greater),
    "le": _two(jnp.less_equal),
    "logaddexp": _two(jnp.logaddexp),
    "lt": _two(jnp.less),
    "max": _extreme("max", jnp.maximum, _AMAX),
    "maximum": _two(jnp.maximum),
    "min": _extreme("min", jnp.minimum, _AMIN),
    "minimum": _two(jnp.minimum),
    "mul": _two(jnp.multiply),
    "multiply": _two(jnp.multiply),
    "ne": _two(jnp.not_equal),
    "pow": _POWER,
    "sub": _two(jnp.subtract),
    "subtract": _two(jnp.subtract),
    "truediv": _DIVIDED,
    "true_divide": _DIVIDED,
    "huber_loss": _difference(_huber, "delta"),
    "l1_loss": _difference(jnp.abs),
    "mse_loss": _difference(jnp.square),
    "smooth_l1_loss": _difference(_smooth_l1, "beta"),
    # Masks.
    "and_": _BOTH,
    "invert": _NOT,
    "logical_and": _BOTH,
    "logical_not": _NOT,
    "logical_or": _EITHER,
    "logical_xor": _OTHER,
    "masked_fill": _entries(_masked_fill, "input", "mask", "value"),
    "or_": _EITHER,
    "where": _entries(_where, "condition", "input", "other"),
    "xor": _OTHER,
    # Reductions, and what runs along an axis.
    "all": _reduction(jnp.all, lambda dtype: True),
    "amax": _AMAX,
    "amin": _AMIN,
    "any": _reduction(jnp.any, lambda dtype: False),
    "cumsum": Operation(_cumsum, ("input", "dim", "dtype"), 2),
    "dot": Operation(_dot, ("input", "other"), 2),
    "flip": Operation(_flip, ("input", "dims"), 2),
    "log_softmax": Operation(_log_softmax, ("input", "dim", "dtype"), 2),
    "logsumexp": Operation(_LOGSUMEXP.function, ("input", "dim", "keepdim"), 2),
    "matmul": Operation(_dot, ("input", "other"), 2),
    "mean": Operation(_mean, ("input", "dim", "keepdim", "dtype")),
    "prod": _reduction(jnp.prod, lambda dtype: 1),
    "softmax": Operation(_softmax, ("input", "dim", "dtype"), 2),
    "std": Operation(_std, _SPREAD),
    "sum": _SUM,
    "var": Operation(_var, _SPREAD),
    # Shapes and dtypes.
    "bool": _to("bool"),
    "clone": _SAME,
    "contiguous": _SAME,
    "detach": _DETACHED,
    "float": _to("float32"),
    "getattr": Operation(attribute, ("input", "name"), 2),
    "getitem": Operation(item, ("input", "key"), 2),
    "int": _to("int32"),
    "long": _to("int64"),
    "numel": Operation(lambda value: value.like(value.size(dims(value, None)), ()), ("input",)),
    "ones_like": Operation(lambda value: value.like(jnp.ones_like(value.array)), ("input",)),
    "size": Operation(sizes, ("input", "dim")),
    "squeeze": Operation(squeeze, ("input", "dim")),
    "to": Operation(_converted, ("input", "dtype"), 2),
    "unsqueeze": Operation(unsqueeze, ("input", "dim"), 2),
    "zeros_like": Operation(lambda value: value.like(jnp.zeros_like(value.array)), ("input",)),
}
"""The operations by the last part of their names; methods and functions are the same."""
