"""Two processes that call each other's functions through pipes.

Built-in types are copied, and arguments that a call changes in place are changed on the caller's
side too. Anything else stays where it is: the other side gets a proxy of it, whose attributes,
calls, items and iteration are messages. Exceptions keep their types. A process ends when the other
one is gone.
"""

from __future__ import annotations

import builtins
import json
import os
import weakref

from .encoding import MUTABLE, decode, encode
from .operations import OPERATIONS
from .proxies import ProxyClass, class_chain, make_proxy, make_proxy_class

TYPE_CHECKING = False  # importing typing takes time at every start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO


class Peer:
    """One side of the conversation."""

    def __init__(self, receive: int, send: int) -> None:
        self._incoming: BinaryIO = os.fdopen(receive, "rb")
        self._outgoing = os.fdopen(send, "wb", buffering=0)
        self._mine: dict[int, Any] = {}  # kept alive, so that an id() stays its own
        self._theirs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._classes: dict[int, ProxyClass] = {}
        self.printed: Callable[[], str] = str  # new output of this side's program

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Performs an operation on the other side, answering its own questions meanwhile."""
        data = [self._encode(a) for a in arguments]
        self._send(["ask", operation, data, {k: self._encode(v) for k, v in keywords.items()}])
        # The other side may ask first, such as to call a function that was an argument.
        while (message := self._receive())[0] == "ask":
            self._answer(message)
        kind, value, changed, printed = message
        if printed:
            print(printed, end="")
        for i, new in changed:
            _update(arguments[i], self._decode(new))
        if kind == "raise":
            raise self._decode_error(value)
        if isinstance(value, list) and value[0] == "argument":
            # A function that returns its argument returns the same object, as within one process.
            return arguments[value[1]]
        return self._decode(value)

    def check_reference(self, value: Any) -> None:
        """Raises an exception if a value must not be handed out."""

    def check_operation(self, operation: str, arguments: list[Any]) -> None:
        """Raises an exception if the other side may not perform an operation here."""

    def refuse(self, reason: str) -> None:
        """Raises TypeError: something cannot cross."""
        raise TypeError(reason)

    def describe(self, kind: type) -> list[Any]:
        """Describes a class, for a stand-in on the other side."""
        self._mine[id(kind)] = kind
        return [id(kind), kind.__name__, [self._base(base) for base in class_chain(kind)]]

    def serve(self) -> None:
        """Answers questions until the other side is gone."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: list[Any]) -> None:
        _, operation, data, keywords = message
        arguments: list[Any] = []
        try:
            arguments = [self._decode(a) for a in data]
            named = {k: self._decode(v) for k, v in keywords.items()}
            self.check_operation(operation, arguments)
            returned = OPERATIONS[operation](*arguments, **named)
            same = [i for i, a in enumerate(arguments) if a is returned and type(a) in MUTABLE]
            value = ["argument", same[0]] if same else self._encode(returned)
            answer = ["return", value, self._changes(data, arguments), self.printed()]
        except Exception as error:
            error_data = self._encode_error(error)
            answer = ["raise", error_data, self._changes(data, arguments), self.printed()]
        self._send(answer)

    def _changes(self, data: list[Any], arguments: list[Any]) -> list[Any]:
        # Most calls change nothing, so only differences are sent.
        new = {i: self._encode(a) for i, a in enumerate(arguments) if type(a) in MUTABLE}
        return [[i, a] for i, a in new.items() if a != data[i]]

    def _send(self, message: list[Any]) -> None:
        # JSON, not pickle: reading a pickle can run the sender's code.
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while rest:
                rest = rest[self._outgoing.write(rest) :]
        except BrokenPipeError:
            os._exit(1)

    def _receive(self) -> list[Any]:
        line = self._incoming.readline()
        if not line.endswith(b"\n"):
            os._exit(1)
        return json.loads(line)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _refer(self, value: Any) -> list[Any]:
        kind = type(value)
        if isinstance(kind, ProxyClass) and kind._jaxrl_peer is self:
            return ["yours", value.__dict__["_jaxrl_reference"]]
        if isinstance(value, ProxyClass) and value._jaxrl_peer is self:
            return ["yours", value._jaxrl_reference]
        self.check_reference(value)
        self._mine[id(value)] = value
        if isinstance(value, type):
            return ["class", self.describe(value)]
        return ["mine", id(value), self.describe(kind)]

    def _base(self, base: type) -> Any:
        return base.__name__ if base.__module__ == "builtins" else self.describe(base)

    def _resolve(self, data: list[Any]) -> Any:
        tag, reference, *rest = data
        # Only objects that were handed out are found: an invented number is a KeyError.
        if tag == "yours":
            return self._mine[reference]
        if tag == "class":
            return self._class(reference)
        if tag != "mine":
            raise TypeError(f"{tag!r} is not a kind of value")
        proxy = self._theirs.get(reference)
        if proxy is None:
            proxy = self._theirs[reference] = make_proxy(self._class(rest[0]), reference)
        return proxy

    def _class(self, description: list[Any]) -> ProxyClass:
        reference, name, bases = description
        if reference not in self._classes:
            known = [base if isinstance(base, str) else self._class(base) for base in bases]
            self._classes[reference] = make_proxy_class(self, reference, str(name), known)
        return self._classes[reference]

    def _encode_error(self, error: Exception) -> list[Any]:
        try:
            if type(error).__module__ == "builtins":
                arguments = self._encode(list(error.args))
                return ["builtin", type(error).__name__, arguments]
            return ["object", self._encode(error), self._encode(error.args)]
        except Exception:
            # An exception whose arguments cannot cross still has to be raised on the other side.
            return ["builtin", "RuntimeError", ["list", [type(error).__name__]]]

    def _decode_error(self, data: list[Any]) -> Exception:
        kind, *rest = data
        if kind == "object":
            error = self._decode(rest[0])
            if isinstance(error, Exception):
                error.args = self._decode(rest[1])
        else:
            found = getattr(builtins, rest[0], None)
            if not isinstance(found, type) or not issubclass(found, Exception):
                found = RuntimeError
            error = found(*self._decode(rest[1]))
        # Never SystemExit or KeyboardInterrupt, which would end the process of the tests.
        return error if isinstance(error, Exception) else RuntimeError("an unknown error")


def _update(old: Any, new: Any) -> None:
    """Gives a container the contents of another of its type."""
    if type(old) is not type(new) or type(old) not in MUTABLE:
        return
    old.clear()
    if isinstance(old, (dict, set)):
        old.update(new)
    else:
        old.extend(new)
