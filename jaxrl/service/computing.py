"""Uploaded losses on the devices: the model's programs are those of every other request."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.service.pool import Scored
from jaxrl.service.requests import Limits, decode
from jaxrl.service.state import Store
from jaxrl.service.uploaded.graph import Graph, read_graph
from jaxrl.service.uploaded.program import Outcome, evaluate
from jaxrl.service.wire import Batch, RefusedError

_THROUGH = "cross_entropy"  # whose gradient is that of any loss, given as weights


def compute(
    run: Callable[[Sequence[tuple[str, Batch]]], list[Scored]],
    requests: Sequence[tuple[str, Batch]],
) -> list[Scored | RefusedError]:
    """Computes requests by `run`, which is `Pool.compute`, and those with uploaded losses.

    These take a forward pass more: the log-probs come first, and the derivative of the loss by them
    goes back as weights. A request whose derivative is not finite is refused, and adds nothing,
    unless it asks for the forward pass alone.
    """
    if requests[0][1].own is None:
        return list(run(requests))
    scored = run([(name, _weighted(batch, None)) for name, batch in requests])
    found: list[Scored | RefusedError] = []
    backward = []
    for (name, batch), one in zip(requests, scored, strict=True):
        assert batch.own is not None
        outcome = evaluate(batch.own, one.logprobs, [datum.arrays for datum in batch.data])
        wrong = [i for i, slope in enumerate(outcome.slopes) if not np.isfinite(slope).all()]
        if wrong and not batch.forward_only:
            text = f"datum {wrong[0]}: the derivative of the loss by the log-probs is not finite"
            found.append(RefusedError(text))
            continue
        found.append(Scored(one.logprobs, list(outcome.losses), _metrics(outcome)))
        if not batch.forward_only:
            backward.append((name, _weighted(batch, outcome.slopes)))
    if backward:
        run(backward)
    return found


def find_graph(store: Store, loss: str) -> Graph:
    """Returns an uploaded loss by its id; raises RefusedError if there is none."""
    row = store.one("SELECT body FROM requests WHERE id = ? AND kind = 'loss'", loss)
    if row is None:
        raise RefusedError(f"there is no loss {loss!r}; create it with create_custom_loss")
    return read_graph(row["body"])


def prepare_again(store: Store, model: str, limits: Limits) -> None:
    """Compiles the programs of uploaded losses that a model's replay needs after a restart, so that
    the thread of the devices finds them. The replay reports what cannot be read."""
    rows = store.all(
        "SELECT body FROM requests WHERE target = ? AND kind = 'compute' AND status = 'done' "
        "AND body IS NOT NULL",
        model,
    )
    for row in rows:
        with contextlib.suppress(ValueError):
            decode("compute", row["body"], limits)


def _weighted(batch: Batch, slopes: Sequence[np.ndarray] | None) -> Batch:
    """Makes the forward pass, or the backward pass of these derivatives."""
    weights = [np.zeros(one.targets.shape, np.float32) for one in batch.data]
    if slopes is not None:
        weights = [-slope for slope in slopes]
    data = [
        dataclasses.replace(one, arrays={"weights": own})
        for one, own in zip(batch.data, weights, strict=True)
    ]
    return Batch(data, _THROUGH, slopes is None)


def _metrics(outcome: Outcome) -> dict[str, float]:
    """Combines the metrics of data as the ends of their names say."""
    return {
        name: float(np.mean(x) if name.endswith(":mean") else np.sum(x, dtype=np.float64))
        for name, x in outcome.metrics.items()
    }
