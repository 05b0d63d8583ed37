"""Values as plain data that JSON can carry: copies of built-in types, references to all others."""

from __future__ import annotations

import builtins
import collections
import enum
import importlib

TYPE_CHECKING = False  # importing typing takes time at every start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ITSELF = (bool, float, str, type(None))
_MOST = 1 << 53  # larger integers are sent in hexadecimal, which has no limit of digits

# The arguments that make an equal copy. Exact types only: a subclass may behave differently.
_ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.tuple": lambda x: (list(x),),
    "builtins.set": lambda x: (list(x),),
    "builtins.frozenset": lambda x: (list(x),),
    "builtins.bytearray": lambda x: (bytes(x),),
    "builtins.complex": lambda x: (x.real, x.imag),
    "builtins.range": lambda x: (x.start, x.stop, x.step),
    "builtins.slice": lambda x: (x.start, x.stop, x.step),
    "collections.deque": lambda x: (list(x), x.maxlen),
    "collections.Counter": lambda x: (dict(x),),
    "collections.OrderedDict": lambda x: (list(x.items()),),
    "collections.defaultdict": lambda x: (None, dict(x)),
    "datetime.date": lambda x: (x.year, x.month, x.day),
    "datetime.time": lambda x: (x.hour, x.minute, x.second, x.microsecond),
    "datetime.timedelta": lambda x: (x.days, x.seconds, x.microseconds),
    "datetime.datetime": lambda x: (
        *(x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond),
    ),
    "decimal.Decimal": lambda x: (str(x),),
    "fractions.Fraction": lambda x: (x.numerator, x.denominator),
}
_VIEWS = [f"builtins.dict_{part}" for part in ("keys", "values", "items")]
MUTABLE = (list, dict, set, bytearray, collections.deque)

_named_tuples: dict[tuple[str, ...], Any] = {}


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """Returns JSON data of a value; `refer` encodes values that are not copied."""
    kind: Any = type(value)
    if kind in _ITSELF:
        return value
    if kind is int:
        return value if abs(value) < _MOST else ["int", hex(value)]
    if kind is list:
        return ["list", [encode(item, refer) for item in value]]
    if kind is dict:
        return ["dict", [[encode(k, refer), encode(v, refer)] for k, v in value.items()]]
    if kind is bytes:
        return ["bytes", value.decode("latin1")]
    name = f"{kind.__module__}.{kind.__qualname__}"
    # A time zone is an object of any class, and cannot be copied.
    if name in _ARGUMENTS and getattr(value, "tzinfo", None) is None:
        return ["make", name, [encode(part, refer) for part in _ARGUMENTS[name](value)]]
    if issubclass(kind, tuple) and (fields := getattr(kind, "_fields", None)):
        items = [encode(item, refer) for item in value]
        return ["namedtuple", [kind.__name__, *fields], items]
    if issubclass(kind, (int, float, str)) and not issubclass(kind, enum.Enum):
        # A number or text of a subclass crosses as the plain value, which tests compare.
        base = next(base for base in (int, float, str) if issubclass(kind, base))
        return encode(base(value), refer)
    if kind is type and vars(builtins).get(value.__name__) is value:
        return ["type", value.__name__]
    if name in _VIEWS:
        return encode(list(value), refer)
    if value is NotImplemented or value is Ellipsis:
        return ["constant", repr(value)]
    return refer(value)


def decode(data: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    """Returns the value of JSON data; `resolve` decodes references. For any data it makes instances
    of built-in types and calls nothing else."""
    if type(data) in _ITSELF or type(data) is int:
        return data
    tag, *rest = data
    if tag == "int":
        return int(rest[0], 16)
    if tag == "list":
        return [decode(item, resolve) for item in rest[0]]
    if tag == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in rest[0]}
    if tag == "bytes":
        return rest[0].encode("latin1")
    if tag == "make":
        return _make(rest[0], [decode(part, resolve) for part in rest[1]])
    if tag == "namedtuple":
        fields = tuple(map(str, rest[0]))
        if fields not in _named_tuples:
            _named_tuples[fields] = collections.namedtuple(fields[0], fields[1:])
        return _named_tuples[fields](*(decode(item, resolve) for item in rest[1]))
    if tag == "type":
        # Types only, because `exec` is a built-in too.
        found = vars(builtins)[rest[0]]
        if not isinstance(found, type):
            raise TypeError(f"{rest[0]!r} is not a built-in type")
        return found
    if tag == "constant":
        return {"NotImplemented": NotImplemented, "Ellipsis": Ellipsis}[rest[0]]
    return resolve(data)


def _make(name: str, arguments: list[Any]) -> Any:
    """Makes an instance of a type of `_ARGUMENTS` from exactly typed arguments."""
    if name not in _ARGUMENTS:
        raise TypeError(f"{name!r} is not copied")
    # A proxy among the arguments would run the other side's code within the constructor.
    exact = (*_ITSELF, int, list, dict, bytes)
    if not all(type(a) in exact for a in arguments):
        raise TypeError(f"arguments of {name} are not plain data")
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)(*arguments)
