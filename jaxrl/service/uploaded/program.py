"""Uploaded losses as compiled programs of their own, apart from the model's."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import count_bucket, jit_forward
from jaxrl.service.uploaded.graph import Graph, compute
from jaxrl.service.uploaded.values import Value

_MOST_FLOATS = 1 << 28  # of one datum: data are computed one after the other
_TRIAL_TARGETS = 1 << 14  # a request's own number is checked when it comes


class Outcome(NamedTuple):
    """The loss of each datum.

    Attributes:
      losses: f32[D].
      slopes: derivatives by the log-probs of the targets, f32[N, K] for each datum.
      metrics: f32[D] by name.
    """

    losses: np.ndarray
    slopes: list[np.ndarray]
    metrics: dict[str, np.ndarray]


class _Part(NamedTuple):
    """Data that one call computes."""

    places: tuple[int, ...]
    rows: int
    length: int
    program: Any


class Prepared(NamedTuple):
    """An uploaded loss with the programs of a request's data, those of similar lengths together.

    A request holds its own, so that no program is compiled again while it waits for its turn.
    """

    graph: Graph
    parts: Sequence[_Part]


def check(graph: Graph) -> None:
    """Computes the shapes of a loss and of its derivative.

    Raises:
      ValueError: for a loss that cannot be computed; the message names the node.
    """
    jax.eval_shape(functools.partial(_each, graph=graph), _shapes(graph, 1, 8, _TRIAL_TARGETS))


def prepare(graph: Graph, counts: Sequence[int], *, targets: int) -> Prepared:
    """Compiles the programs for data of so many tokens, with `targets` per token.

    Raises:
      ValueError: for a loss that does not fit so many targets, or takes too much memory with them.
    """
    if (size := _padded(max(counts)) * targets * len(graph.nodes)) > _MOST_FLOATS:
        raise ValueError(
            f"{max(counts)} tokens with {targets} targets each and {len(graph.nodes)} nodes of the "
            f"uploaded loss may take {size / 2**28:.1f} GiB for one datum; 1 is allowed: give "
            "fewer targets"
        )
    alike: dict[int, list[int]] = {}
    for place, count in enumerate(counts):
        alike.setdefault(_padded(count), []).append(place)
    parts = []
    for length, places in sorted(alike.items()):
        most = max(1, _MOST_FLOATS // (length * targets * (len(graph.inputs) + 1)))
        rows = min(count_bucket(len(places)), 1 << (most.bit_length() - 1))
        program = _compiled(graph, rows, length, targets)
        for begin in range(0, len(places), rows):
            parts.append(_Part(tuple(places[begin : begin + rows]), rows, length, program))
    return Prepared(graph, parts)


def evaluate(
    prepared: Prepared, logprobs: Sequence[np.ndarray], arrays: Sequence[Mapping[str, np.ndarray]]
) -> Outcome:
    """Computes the losses of data.

    Args:
      prepared: the loss, for the data's lengths.
      logprobs: of the targets, f32[N, K] for each datum.
      arrays: the loss's other inputs, f32 of their ranks, for each datum.
    """
    inputs, size = prepared.graph.inputs, len(logprobs)
    first = [one if inputs[0][1] == 2 else one[:, 0] for one in logprobs]
    given = [{**more, "logprobs": own} for more, own in zip(arrays, first, strict=True)]
    found, metrics = np.zeros(size, np.float32), dict[str, np.ndarray]()
    slopes = [np.zeros(0, np.float32)] * size
    for places, rows, length, program in prepared.parts:
        shape = rows, length
        own = {name: _stacked([given[i][name] for i in places], shape=shape) for name, _ in inputs}
        counts = np.zeros(rows, np.int32)
        counts[: len(places)] = [len(logprobs[i]) for i in places]
        losses, derivatives, more = jax.device_get(program(own, counts))
        for row, place in enumerate(places):
            found[place] = losses[row]
            mine = derivatives[row, : counts[row]]
            slopes[place] = mine.reshape(logprobs[place].shape)
            for name, values in more.items():
                metrics.setdefault(name, np.zeros(size, np.float32))[place] = values[row]
    return Outcome(found, slopes, metrics)


def _padded(count: int) -> int:
    return count_bucket(max(count, 64))


def _stacked(values: Sequence[np.ndarray], *, shape: tuple[int, int]) -> np.ndarray:
    """Stacks arrays of data, whose last token is repeated up to the length."""
    rows, length = shape

    def padded(one: np.ndarray) -> np.ndarray:
        if not one.ndim:
            return one
        width = [(0, length - len(one))] + [(0, 0)] * (one.ndim - 1)
        return np.pad(one, width, mode="edge")

    found = [padded(one.astype(np.float32)) for one in values]
    return np.stack(found + [found[0]] * (rows - len(found)))


def _shapes(graph: Graph, rows: int, length: int, targets: int) -> Any:
    whole = (rows, length, targets)
    f32 = {
        name: jax.ShapeDtypeStruct(whole[: rank + 1], jnp.float32) for name, rank in graph.inputs
    }
    return f32, jax.ShapeDtypeStruct((rows,), jnp.int32)


@functools.lru_cache(maxsize=64)
def _compiled(graph: Graph, rows: int, length: int, targets: int) -> Any:
    def run(inputs: Any, counts: Any) -> Any:
        return _each((inputs, counts), graph=graph)

    return jit_forward(run).lower(*_shapes(graph, rows, length, targets)).compile()


def _each(data: Any, *, graph: Graph) -> Any:
    """Computes losses, derivatives and metrics of data, one after the other."""

    def one(datum: Any) -> Any:
        inputs, count = datum

        def loss(logprobs: jax.Array) -> Any:
            own = {**inputs, "logprobs": logprobs}
            return compute(graph, {name: _value(own[name], count) for name, _ in graph.inputs})

        (found, metrics), slope = jax.value_and_grad(loss, has_aux=True)(inputs["logprobs"])
        return found, slope, metrics

    return jax.lax.map(one, data)


def _value(array: jax.Array, count: jax.Array) -> Value:
    return Value(array, ("T", *array.shape[1:])[: array.ndim], count)
