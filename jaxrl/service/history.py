"""Metrics of tenants' optimizer steps since the server's start, for the page."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.service.wire import Batch

_MOST_STEPS = 2000  # of a model, the newest
_MOST_MODELS = 256  # those that stepped last
_MEANS = ("mismatch/k3_kl", "mismatch/token_mult_error")
_PARTS = ("probe/alpha", "probe/beta")  # of requests that ask for the shadow

Curve = list[list[float]]
"""Steps and values."""


class _Pending(NamedTuple):
    """Sums of a model's requests since its last step."""

    tokens: int = 0
    loss: float = 0.0
    means: Mapping[str, tuple[int, float]] = {}  # tokens of requests with the metric, and its sum


Row = tuple[int, dict[str, float]]
"""A step and its metrics."""


class _Steps:
    """The steps of one model."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.rows: deque[Row] = deque(maxlen=_MOST_STEPS)
        self.pending, self.since = _Pending(), time.monotonic()


class History:
    """The steps of the models that stepped last; any thread may call it."""

    def __init__(self) -> None:
        """Begins without a model."""
        self._lock, self._models = threading.Lock(), dict[str, _Steps]()

    def computed(self, model: str, batch: Batch, *, metrics: Mapping[str, float]) -> None:
        """Adds a forward_backward request's metrics to the next step's."""
        tokens = sum(len(one.tokens) for one in batch.data)
        with self._lock:
            of = self._of(model)
            before = of.pending
            means = dict(before.means)
            for name, value in _means(metrics).items():
                count, total = means.get(name, (0, 0.0))
                means[name] = count + tokens, total + tokens * value
            loss = before.loss + metrics["loss:sum"]
            of.pending = _Pending(before.tokens + tokens, loss, means)

    def stepped(self, model: str, metrics: Mapping[str, float]) -> None:
        """Adds an optimizer step with its metrics; the loss is that of a token."""
        with self._lock:
            of, now = self._of(model), time.monotonic()
            pending, seconds = of.pending, now - of.since
            of.pending, of.since = _Pending(), now
            of.count, of.seconds = of.count + 1, of.seconds + seconds
            row = {name: metrics[name] for name in ("grad_norm", "loss_scale") if name in metrics}
            if tokens := pending.tokens:
                row |= {"loss": pending.loss / tokens, "tokens_per_second": tokens / seconds}
                row |= _joined({k: total / count for k, (count, total) in pending.means.items()})
            of.rows.append((of.count, row))

    def counts(self) -> dict[str, int]:
        """Returns the number of steps of each model with one."""
        with self._lock:
            return {name: of.count for name, of in self._models.items() if of.count}

    def runs(self, models: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Returns `last_step`, `seconds` and `series` of those of the models that are known."""
        with self._lock:
            found = [(name, self._models[name]) for name in models if name in self._models]
            copied = [(name, of.count, of.seconds, [*of.rows]) for name, of in found]
        return {
            name: {"last_step": count, "seconds": seconds, "series": _curves(rows)}
            for name, count, seconds, rows in copied
        }

    def _of(self, model: str) -> _Steps:
        """Returns the steps of a model, which becomes the newest."""
        of = self._models[model] = self._models.pop(model, None) or _Steps()
        if len(self._models) > _MOST_MODELS:
            del self._models[next(iter(self._models))]
        return of


def _means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Selects the metrics of a request that are means over tokens; a standard deviation becomes a
    mean square, so that those of several requests add up."""
    found = {name: metrics[key] for name in _MEANS if (key := f"{name}:mean") in metrics}
    for name in _PARTS:
        if f"{name}:mean" in metrics:
            mean, deviation = metrics[f"{name}:mean"], metrics[f"{name}_std:mean"]
            found |= {name: mean, f"{name}_square": mean**2 + deviation**2}
    return found


def _joined(means: Mapping[str, float]) -> dict[str, float]:
    """Turns mean squares back into standard deviations."""
    found = dict(means)
    for name in _PARTS:
        if name in found:
            variance = found.pop(f"{name}_square") - found.pop(name) ** 2
            found[f"{name}_std"] = math.sqrt(max(0.0, variance))
    return found


def _curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """Returns the curve of each metric, without numbers that are not finite."""
    found: dict[str, Curve] = {}
    for step, row in rows:
        for name, value in row.items():
            if math.isfinite(value):
                steps, values = found.setdefault(name, [[], []])
                steps.append(step)
                values.append(float(f"{value:.6g}"))
    return found
