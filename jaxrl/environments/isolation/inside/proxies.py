"""Stand-ins for objects and classes of the other process."""

from __future__ import annotations

import builtins

from .operations import ARITHMETIC, COMPARISONS, FORWARDED

TYPE_CHECKING = False  # importing typing takes time at every start
if TYPE_CHECKING:
    from typing import Any


class ProxyClass(type):
    """The class of all proxies of one class."""

    _jaxrl_peer: Any = None
    _jaxrl_reference = 0

    def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        """Refuses a class that the tests derive from one of the code."""
        if "_jaxrl_peer" not in members:
            for base in bases:
                if isinstance(base, ProxyClass) and base._jaxrl_peer:
                    base._jaxrl_peer.refuse(f"the class {name} derives from a class of the code")
        return super().__new__(mcs, name, bases, members)

    def __call__(cls, /, *arguments: Any, **keywords: Any) -> Any:
        """Makes an instance on the other side."""
        return cls._jaxrl_peer.ask("call", cls, *arguments, **keywords)

    def __getattr__(cls, name: str) -> Any:
        """Asks for an attribute of the class."""
        _check_name(name)
        return cls._jaxrl_peer.ask("getattr", cls, name)

    def __iter__(cls) -> Any:
        """Iterates over the class, such as an enumeration."""
        return cls._jaxrl_peer.ask("iter", cls)

    def __getitem__(cls, key: Any) -> Any:
        """Asks for an item of the class, such as an enumeration."""
        return cls._jaxrl_peer.ask("getitem", cls, key)


class Proxy(metaclass=ProxyClass):
    """An object of the other process.

    It compares and computes only with other proxies. Otherwise the other process would see, and
    decide about, values that it must not learn: `f(1) == 3` is false if f returns a proxy.
    """

    def __getattr__(self, name: str) -> Any:
        _check_name(name)
        return type(self)._jaxrl_peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "args" or name.startswith("__"):  # such as the traceback of an exception
            return object.__setattr__(self, name, value)
        type(self)._jaxrl_peer.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self)._jaxrl_peer.ask("delattr", self, name)

    def __mro_entries__(self, _: tuple[Any, ...]) -> Any:
        # Without it, `class T(proxy)` in the tests would be whatever the other side makes of it.
        raise TypeError(f"an object of {type(self).__name__} is not a class")

    def __exit__(self, *_: Any) -> None:
        type(self)._jaxrl_peer.ask("exit", self)


def _check_name(name: str) -> None:
    # Libraries probe for such attributes, and act on what they find.
    if name.startswith("__") and name.endswith("__") and name not in ("__name__", "__doc__"):
        raise AttributeError(name)


def _forward(operation: str) -> Any:
    def method(self: Proxy, /, *arguments: Any, **keywords: Any) -> Any:
        return type(self)._jaxrl_peer.ask(operation, self, *arguments, **keywords)

    return method


def _forward_if_both(operation: str) -> Any:
    def method(self: Proxy, other: Any) -> Any:
        if not isinstance(other, Proxy) or type(other)._jaxrl_peer is not type(self)._jaxrl_peer:
            return NotImplemented
        return type(self)._jaxrl_peer.ask(operation, self, other)

    return method


for _name in FORWARDED:
    setattr(Proxy, f"__{_name}__", _forward(_name))
for _name in (*COMPARISONS, *ARITHMETIC):
    setattr(Proxy, f"__{_name}__", _forward_if_both(_name))


def make_proxy(cls: ProxyClass, reference: int) -> Any:
    """Makes a proxy without calling the constructor of the other side."""
    builtin: Any = next(b for b in cls.__mro__ if b.__module__ == "builtins")
    proxy = builtin.__new__(cls)
    proxy.__dict__["_jaxrl_reference"] = reference
    return proxy


def make_proxy_class(peer: Any, reference: int, name: str, bases: list[Any]) -> ProxyClass:
    """Makes a stand-in for a class from the stand-ins of its bases and built-in exceptions."""
    real: list[Any] = [
        getattr(builtins, base, None) if isinstance(base, str) else base for base in bases
    ]
    kept = [b for b in real if isinstance(b, ProxyClass) or _is_exception(b)]
    if not any(isinstance(base, ProxyClass) for base in kept):
        kept.insert(0, Proxy)
    return ProxyClass(name, tuple(kept), {"_jaxrl_peer": peer, "_jaxrl_reference": reference})


def class_chain(kind: type) -> list[type]:
    """Returns the bases of a class that its stand-in has too."""
    if kind.__module__ == "builtins" and not _is_exception(kind):
        return []
    return [b for b in kind.__bases__ if b.__module__ != "builtins" or _is_exception(b)]


def _is_exception(base: Any) -> bool:
    return isinstance(base, type) and issubclass(base, Exception)
