"""Metrics of tenants' optimizer steps since the server's start, for the page."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl.service.wire import Batch

_MOST_STEPS = 2000  # of a model, the newest
_MEANS = ("mismatch/k3_kl", "mismatch/token_mult_error")

Curve = list[list[float]]
"""Steps and values."""


class _Pending(NamedTuple):
    """Sums of a model's requests since its last step."""

    tokens: int = 0
    loss: float = 0.0
    means: Mapping[str, float] = {}  # times tokens


class Steps:
    """The steps of one model."""

    def __init__(self) -> None:
        """Begins without a step."""
        self.count, self.seconds = 0, 0.0
        self.rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=_MOST_STEPS)
        self.pending, self.since = _Pending(), time.monotonic()

    def curves(self) -> dict[str, Curve]:
        """Returns the curve of each metric, without numbers that are not finite."""
        found: dict[str, Curve] = {}
        for step, row in self.rows:
            for name, value in row.items():
                if not math.isfinite(value):
                    continue
                steps, values = found.setdefault(name, [[], []])
                steps.append(step)
                values.append(float(f"{value:.6g}"))
        return found


class History:
    """The steps of all models; any thread may call it. `version` grows with each step."""

    def __init__(self) -> None:
        """Begins without a model."""
        self._lock, self._models, self.version = threading.Lock(), dict[str, Steps](), 0

    def computed(self, model: str, batch: Batch, *, metrics: Mapping[str, float]) -> None:
        """Adds a forward_backward request's metrics to the next step's."""
        tokens = sum(len(one.tokens) for one in batch.data)
        with self._lock:
            of = self._models.setdefault(model, Steps())
            before = of.pending
            means = {
                name: before.means.get(name, 0.0) + tokens * metrics[f"{name}:mean"]
                for name in _MEANS
                if f"{name}:mean" in metrics
            }
            loss = before.loss + metrics["loss:sum"]
            of.pending = _Pending(before.tokens + tokens, loss, means)

    def stepped(self, model: str, metrics: Mapping[str, float]) -> None:
        """Adds an optimizer step with its metrics; the loss is that of a token."""
        with self._lock:
            of, now = self._models.setdefault(model, Steps()), time.monotonic()
            pending, seconds = of.pending, now - of.since
            of.pending, of.since = _Pending(), now
            of.count, of.seconds, self.version = (
                of.count + 1,
                of.seconds + seconds,
                self.version + 1,
            )
            row = {name: metrics[name] for name in ("grad_norm", "loss_scale") if name in metrics}
            if tokens := pending.tokens:
                row |= {"loss": pending.loss / tokens, "tokens_per_second": tokens / seconds}
                row |= {name: value / tokens for name, value in pending.means.items()}
            of.rows.append((of.count, row))

    def runs(self) -> dict[str, dict[str, Any]]:
        """Returns `last_step`, `seconds` and `series` of each model with a step."""
        with self._lock:
            return {
                name: {"last_step": of.count, "seconds": of.seconds, "series": of.curves()}
                for name, of in self._models.items()
                if of.count
            }
