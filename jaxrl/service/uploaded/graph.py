"""Uploaded losses: graphs of torch's operations that the official client traces and sends as data.

A graph is a list of nodes in the order of execution, as `tinker.types.CustomLossGraph` describes.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tinker import types

from jaxrl.core import nearest
from jaxrl.service.uploaded.operations import OPERATIONS
from jaxrl.service.uploaded.values import Dtype, Value

MOST_BYTES = 1 << 18
MOST_NODES = 256

_MOST_INPUTS = 16  # the client's own limit
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MODULES = re.compile(
    r"(torch\.nn\.functional|torch\._C\._nn|torch\._C\._special|torch\.special|torch|operator|math)"
    r"\.(special_)?"
)
_IGNORED = ("_stacklevel", "inplace")  # what torch.nn.functional passes on by default
_ADVICE = "compute the loss in the client: give the function itself to forward_backward_custom"


@dataclasses.dataclass(frozen=True)
class Graph:
    """A loss of one datum. Two with the same text are equal.

    Attributes:
      text: all that is computed, as JSON.
      inputs: names of the arrays and their ranks: 0 for a number, 1 for [N], 2 for [N, K]. The
        first are the log-probs of the targets.
      nodes: the operations, in order.
    """

    text: str
    inputs: tuple[tuple[str, int], ...] = dataclasses.field(compare=False)
    nodes: tuple[types.CustomLossNode, ...] = dataclasses.field(compare=False)


def read_graph(body: bytes) -> Graph:
    """Reads the body of a create_custom_loss request.

    Raises:
      ValueError: for a graph that is too large, has an operation without a counterpart in JAX, or
        does not compute a number from the log-probs; the message names the node.
    """
    if len(body) > MOST_BYTES:
        raise ValueError(f"the graph has {len(body)} bytes; {MOST_BYTES} are allowed: {_ADVICE}")
    request = types.CreateCustomLossRequest.model_validate_json(body)
    if len(request.graph.nodes) > MOST_NODES:
        count = len(request.graph.nodes)
        raise ValueError(f"the graph has {count} nodes; {MOST_NODES} are allowed: {_ADVICE}")
    inputs = tuple((one.name, one.rank) for one in request.inputs)
    names = [name for name, _ in inputs]
    if not 0 < len(inputs) <= _MOST_INPUTS or len(set(names)) < len(names):
        raise ValueError(f"inputs {names}: there must be 1 to {_MOST_INPUTS}, each once")
    if names[0] != "logprobs" or inputs[0][1] == 0 or not all(map(_NAME.fullmatch, names)):
        raise ValueError(
            f"inputs {names}: the first must be logprobs of rank 1 or 2, and the others lowercase "
            "names of arrays in loss_fn_inputs"
        )
    if inputs[0][1] == 1 and any(rank == 2 for _, rank in inputs):
        raise ValueError("an input of rank 2 needs logprobs of rank 2; give [N, K] target_tokens")
    placed = [one.target for one in request.graph.nodes if one.op == "placeholder"]
    if placed != names:
        raise ValueError(f"the graph's placeholders are {placed}; the inputs are {names}")
    text = request.model_dump_json(include={"inputs", "graph"})
    return Graph(text, inputs, tuple(request.graph.nodes))


def compute(graph: Graph, inputs: Mapping[str, Value]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the loss of a datum, f32, and its metrics by name, f32.

    Raises:
      ValueError: for a node that cannot be computed.
    """
    known: dict[str, Any] = {}
    for place, node in enumerate(graph.nodes):
        try:
            if node.op == "output":
                return _output(node, known, last=place == len(graph.nodes) - 1)
            if node.name in known:
                raise ValueError(f"an earlier node has the name {node.name!r}")
            if node.op == "placeholder":
                known[node.name] = inputs[node.target]
            else:
                known[node.name] = _result(node, known)
        except Exception as error:  # a client may have written anything
            reason = (str(error).splitlines() or [""])[0][:300]
            raise ValueError(f"graph: node {place}, {node.target[:80]!r}: {reason}") from None
    raise ValueError("graph: there is no output node")


def _result(node: types.CustomLossNode, known: Mapping[str, Any]) -> Any:
    name = node.target
    if node.op == "call_function" and name != "getattr":
        name = "" if not (module := _MODULES.match(name)) else name[module.end() :]
    elif node.op not in ("call_function", "call_method"):
        raise ValueError(f"a node of the kind {node.op} cannot be computed here; {_ADVICE}")
    operation = OPERATIONS.get(name)
    if operation is None:
        near = nearest(name, OPERATIONS)
        hint = f" (there is {near!r})" if near else ""
        raise ValueError(f"this operation has no counterpart here{hint}; {_ADVICE}")
    given = [_decoded(one, known) for one in node.args]
    if len(given) > len(operation.parameters):
        raise ValueError(f"it takes {', '.join(operation.parameters)}; {len(given)} were given")
    bound = dict(zip(operation.parameters, given, strict=False))
    for key, value in node.kwargs.items():
        if key in operation.parameters and key not in bound:
            bound[key] = _decoded(value, known)
        elif value is not None and key not in _IGNORED:
            raise ValueError(f"the argument {key!r} has no counterpart here; {_ADVICE}")
    if any(bound.get(key) is None for key in operation.parameters[: operation.required]):
        raise ValueError(f"it needs {', '.join(operation.parameters[: operation.required])}")
    return operation.function(*(bound.get(key) for key in operation.parameters))


def _decoded(arg: Any, known: Mapping[str, Any]) -> Any:
    """Reads an argument of a node."""
    if isinstance(arg, int) and abs(arg) >= 2**31:
        raise ValueError(f"the number {arg:.3g} does not fit 32 bits")
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    if isinstance(arg, list):
        return tuple(_decoded(one, known) for one in arg)
    if not isinstance(arg, dict) or len(arg) != 1:
        raise ValueError(f"the argument {str(arg)[:80]} is in no form that the client sends")
    ((kind, content),) = arg.items()
    read: Mapping[str, Callable[[], Any]] = {
        "ref": lambda: _referred(content, known),
        "tuple": lambda: _decoded(list(content), known),
        "slice": lambda: slice(*(_decoded(one, known) for one in content)),
        "ellipsis": lambda: Ellipsis,
        "float": lambda: {"inf": jnp.inf, "-inf": -jnp.inf, "nan": jnp.nan}[content],
        "dtype": lambda: Dtype(content),
    }
    if kind not in read:
        raise ValueError(f"an argument of the kind {kind[:80]!r} has no counterpart here")
    return read[kind]()


def _referred(name: Any, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"it refers to {str(name)[:80]!r}, which no earlier node has")
    return known[name]


def _output(
    node: types.CustomLossNode, known: Mapping[str, Any], *, last: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    if not last:
        raise ValueError("nodes follow the output")
    (returned,) = node.args
    loss, metrics = returned["tuple"] if isinstance(returned, dict) else returned
    found = _number(_decoded(loss, known), "the loss")
    named: Mapping[str, Any] = metrics["dict"]
    for key in named:
        if not _METRIC.fullmatch(key):
            raise ValueError(f"metric {key[:80]!r} must be custom/NAME:sum or custom/NAME:mean")
    shown = {key: _number(_decoded(value, known), key) for key, value in named.items()}
    return found, {key: jax.lax.stop_gradient(value) for key, value in shown.items()}


def _number(value: Any, name: str) -> jax.Array:
    if not isinstance(value, Value) or value.axes:
        axes: Sequence[Any] = value.axes if isinstance(value, Value) else ()
        shape = list(axes) if isinstance(value, Value) else type(value).__name__
        raise ValueError(f"{name} is {shape}; it must be a tensor without axes, such as x.sum()")
    return value.array.astype(jnp.float32)
