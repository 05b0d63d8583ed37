"""The loss of a critic: the distance of its values from the returns."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import Outcomes
from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_means
from jaxrl.losses import bounds
from jaxrl.losses.algebra import TokenLoss, token_loss
from jaxrl.losses.formulas import formula_text, with_formula
from jaxrl.losses.objectives import Objective
from jaxrl.losses.scores import Need, Scores, require


class Critic(NamedTuple):
    """The critic of a recipe.

    The objective reads `Scores.values`. Outcomes with the critic's values give the returns, its
    targets before each token: f32[C] for each completion.
    """

    objective: Objective
    returns: Callable[[Outcomes], Sequence[np.ndarray]]

    def __repr__(self) -> str:
        return f"Critic({self.objective!r}, {formula_text(self.returns)})"


def clipped_value_loss(
    values: jax.Array,
    old: jax.Array,
    returns: jax.Array,
    *,
    clip: float,
    huber: float | None = None,
) -> jax.Array:
    """max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2 per token (arXiv:2005.12729).

    Beyond the clip the loss cannot fall further, so a value moves at most that far towards its
    target before the values are recomputed. Movement away from the target is not bounded. All
    are f32[B, T]; `old` are the values from which the advantages were computed. With `huber`, a
    distance x to the return costs huber (x - huber / 2) beyond huber, so that a far return has a
    bounded gradient (Huber 1964; AReaL's critic has 10).

    Example:
      >>> values, returns = jnp.array([0.5, 0.75]), jnp.ones(2)
      >>> print(clipped_value_loss(values, jnp.zeros(2), returns, clip=0.5))  # 0.75 counts as 0.5
      [0.125 0.125]
    """
    bounded = old + jnp.clip(values - old, -clip, clip)
    if huber is None:
        return 0.5 * jnp.maximum((values - returns) ** 2, (bounded - returns) ** 2)
    free, clipped = (_huber(x - returns, huber) for x in (values, bounded))
    return jnp.maximum(free, clipped)


def _huber(distance: jax.Array, delta: float) -> jax.Array:
    near = jnp.clip(distance, -delta, delta)
    return near * (distance - 0.5 * near)


@with_formula
def value_loss(*, clip: float = 0.2, huber: float | None = None) -> TokenLoss:
    """`clipped_value_loss` as a term. Reports "value/loss", "value/mean" and "value/clipped", the
    share of action tokens at which the clipped value gives the loss.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[0, 0], logprobs=-1, values=[0.25, 0.75])
      >>> batch = batch.replace(values=jnp.zeros((1, 2)), returns=jnp.ones((1, 2)))
      >>> print(value_loss(clip=0.5).apply(scores, batch)[0])
      [[0.28125 0.125  ]]

    Raises:
      ValueError: for a clip or a huber that is not positive; when the loss is applied, if the batch
        holds no values and returns.
    """
    bounds.positive("value_loss: clip", clip)
    if huber is not None:
        bounds.positive("value_loss: huber", huber)

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        values = require(scores, Need.VALUES)
        if batch.values is None or batch.returns is None:
            raise ValueError(
                "value_loss: batch.values or batch.returns is None; give both to pack()"
            )
        compared = functools.partial(
            clipped_value_loss, returns=batch.returns, clip=clip, huber=huber
        )
        loss = compared(values, batch.values)
        beyond = loss > compared(values, values)
        reports = {"value/loss": loss, "value/mean": values, "value/clipped": beyond}
        return loss, masked_means(reports, batch.action_mask)

    return token_loss(apply, Need.VALUES)
