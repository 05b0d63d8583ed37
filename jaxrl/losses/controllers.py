"""Controllers: coefficients of terms that follow a measurement from rollout to rollout.

A controller has no state; a run keeps the coefficient in its checkpoints. The loop passes it to a
step in `batch.coefficients` and asks the controller for the next one after each rollout.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics
from jaxrl.losses import bounds
from jaxrl.losses.algebra import TokenLoss
from jaxrl.losses.scores import Scores


class Controller(Protocol):
    """Controller of the coefficient of one term."""

    metric: ClassVar[str]  # the metric that it follows

    @property
    def initial(self) -> float:
        """The first coefficient."""

    def next(self, coefficient: float, *, measured: float) -> float:
        """Returns the coefficient after a rollout in which the metric had this value."""


def controlled(term: TokenLoss, name: str) -> TokenLoss:
    """A term times the coefficient `name`, which a controller sets for each rollout.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl.losses import entropy_bonus, one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, entropy=[0.5, 2])
      >>> batch = batch.replace(coefficients={"entropy": jnp.full((1, 2), 0.1)})
      >>> controlled(entropy_bonus(), "entropy").apply(scores, batch)[0]
      Array([[-0.05, -0.2 ]], dtype=float32)

    Raises:
      ValueError: when the loss is applied, if the batch does not hold the coefficient.
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        if batch.coefficients is None or name not in batch.coefficients:
            raise ValueError(
                f"controlled: batch.coefficients has no {name!r}; write "
                f"with_terms(recipe, {name}_target=...), which has the loop set it"
            )
        value, metrics = term.apply(scores, batch)
        return batch.coefficients[name] * value, metrics

    return dataclasses.replace(term, apply=apply, formula=f"controlled({term!r}, {name!r})")


@dataclass(frozen=True, kw_only=True)
class EntropyController:
    """Raises the coefficient of the entropy bonus while the policy's entropy is below a target, and
    lowers it while it is above (Skywork-OR1, arXiv:2505.22312).

    Example:
      >>> controller = EntropyController(target=0.5, step=0.25)
      >>> controller.next(0.5, measured=0.3), controller.next(0.5, measured=0.7)
      (0.75, 0.25)

    Raises:
      ValueError: for a number out of range.
    """

    metric: ClassVar[str] = "entropy"

    initial: float = 0.0  # the first coefficient; all stay in [0, 1]
    target: float = 0.2  # entropy, nats per token
    step: float = 0.005  # change of the coefficient after each rollout

    def __post_init__(self) -> None:
        bounds.fraction("entropy", self.initial)
        bounds.positive("entropy_target", self.target)
        bounds.positive("entropy_step", self.step)

    def next(self, coefficient: float, *, measured: float) -> float:
        """Returns the coefficient after a rollout whose mean entropy was `measured`. One that is
        not finite, as of a step that overflowed and was skipped, changes nothing."""
        if not math.isfinite(measured):
            return coefficient
        move = self.step if measured < self.target else -self.step
        return min(max(coefficient + move, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class KLController:
    """Multiplies the coefficient of the divergence by 1 + step clip(KL / target - 1, -.2, .2)
    (Ziegler et al., arXiv:1909.08593, with the divergence of whole completions, 6 nats, in the
    reward; veRL's "adaptive" has step = completions / horizon).

    Example:
      >>> controller = KLController(initial=0.01, target=0.5, step=0.1)
      >>> [round(controller.next(0.01, measured=kl), 5) for kl in (0.45, 0.5, 9.0)]
      [0.0099, 0.01, 0.0102]

    Raises:
      ValueError: for a number out of range; an initial coefficient of 0 would stay 0.
    """

    metric: ClassVar[str] = "kl/reference"

    initial: float  # the first coefficient
    target: float  # divergence, nats per token
    step: float = 0.1  # the paper's K

    def __post_init__(self) -> None:
        bounds.positive("kl, with kl_target,", self.initial)
        bounds.positive("kl_target", self.target)
        bounds.positive("kl_step", self.step)

    def next(self, coefficient: float, *, measured: float) -> float:
        """Returns the coefficient after a rollout whose mean divergence was `measured`. One that is
        not finite, as of a step that overflowed and was skipped, changes nothing."""
        if not math.isfinite(measured):
            return coefficient
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.step * error)
