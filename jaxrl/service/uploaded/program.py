"""Uploaded losses as compiled programs of their own, apart from the model's."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import jit_forward
from jaxrl.service.sizes import power_of_two
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


def check(graph: Graph) -> None:
    """Computes the shapes of a loss and of its derivative.

    Raises:
      ValueError: for a loss that cannot be computed; the message names the node.
    """
    jax.eval_shape(functools.partial(_each, graph=graph), _shapes(graph, 1, 8, _TRIAL_TARGETS))


def prepare(graph: Graph, counts: Sequence[int], *, targets: int) -> Any:
    """Compiles the program for data of so many tokens, with `targets` per token.

    Raises:
      ValueError: for a loss that does not fit so many targets, or takes too much memory with them
        or with so many data.
    """
    length = power_of_two(max(max(counts), 64))
    if (size := length * targets * len(graph.nodes)) > _MOST_FLOATS:
        raise ValueError(
            f"{max(counts)} tokens with {targets} targets each and {len(graph.nodes)} nodes of the "
            f"uploaded loss may take {size / 2**28:.1f} GiB for one datum; 1 is allowed: give "
            "fewer targets"
        )
    rows = power_of_two(len(counts))
    if (size := rows * length * targets * (len(graph.inputs) + 1)) > _MOST_FLOATS:
        raise ValueError(
            f"{len(counts)} data of up to {max(counts)} tokens with {targets} targets each take "
            f"{size / 2**28:.1f} GiB side by side; 1 is allowed: give them in several requests, "
            "those of similar lengths together"
        )
    return _compiled(graph, rows, length, targets)


def evaluate(
    graph: Graph, logprobs: Sequence[np.ndarray], arrays: Sequence[Mapping[str, np.ndarray]]
) -> Outcome:
    """Computes the losses of data.

    Args:
      graph: the loss.
      logprobs: of the targets, f32[N, K] for each datum.
      arrays: the loss's other inputs, f32 of their ranks, for each datum.
    """
    counts = [len(one) for one in logprobs]
    program = prepare(graph, counts, targets=logprobs[0].shape[1])
    count = np.zeros(power_of_two(len(counts)), np.int32)
    count[: len(counts)] = counts
    length = power_of_two(max(max(counts), 64))
    first = [one if graph.inputs[0][1] == 2 else one[:, 0] for one in logprobs]
    given = [{**more, "logprobs": own} for more, own in zip(arrays, first, strict=True)]
    stacked = {name: _stacked([x[name] for x in given], length) for name, _ in graph.inputs}
    losses, slopes, metrics = jax.device_get(program(stacked, count))
    found = [slopes[i, :size].reshape(logprobs[i].shape) for i, size in enumerate(counts)]
    size = len(counts)
    return Outcome(losses[:size], found, {name: x[:size] for name, x in metrics.items()})


def _stacked(values: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stacks arrays of data, whose last token is repeated up to the length."""

    def padded(one: np.ndarray) -> np.ndarray:
        if not one.ndim:
            return one
        width = [(0, length - len(one))] + [(0, 0)] * (one.ndim - 1)
        return np.pad(one, width, mode="edge")

    rows = [padded(one.astype(np.float32)) for one in values]
    return np.stack(rows + [rows[0]] * (power_of_two(len(rows)) - len(rows)))


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
