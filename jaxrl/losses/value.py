"""The loss of a critic: how far its values are from what was received."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import Outcomes
from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses import bounds
from jaxrl.losses.algebra import Need, Objective, Scores, TokenLoss, require, token_loss


class Critic(NamedTuple):
    """What a recipe asks of a critic.

    Attributes:
      objective: what the critic minimises; it reads `Scores.values`.
      returns: outcomes with the critic's values -> for each answer f32[C], what it should have
        expected before each token.
    """

    objective: Objective
    returns: Callable[[Outcomes], Sequence[np.ndarray]]


def clipped_value_loss(
    values: jax.Array, old: jax.Array, returns: jax.Array, *, clip: float
) -> jax.Array:
    """max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2 per token (arXiv:2005.12729).

    Beyond the clip the loss cannot fall further, so a value moves no further than that towards its
    target before the values are computed anew; away from it nothing is bounded.

    Args:
      values: f32[B, T], differentiated.
      old: f32[B, T], the critic's values when the advantages were computed.
      returns: f32[B, T], what was received.
      clip: largest change of a value that still pays.
    """
    bounded = old + jnp.clip(values - old, -clip, clip)
    return 0.5 * jnp.maximum((values - returns) ** 2, (bounded - returns) ** 2)


def value_loss(*, clip: float = 0.2) -> TokenLoss:
    """`clipped_value_loss` as a term. Reports "value/loss", "value/mean" and "value/clipped", the
    share of action tokens whose loss is that of the clipped value.

    Raises:
      ValueError: for a clip that is not positive; when the loss is applied, if the batch holds no
        values and returns.
    """
    bounds.positive("value_loss: clip", clip)  # a large one does not clip

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        values = require(scores, Need.VALUES)
        if batch.values is None or batch.returns is None:
            raise ValueError("value_loss reads batch.values and batch.returns; pack() them")
        loss = clipped_value_loss(values, batch.values, batch.returns, clip=clip)
        fixed = jax.lax.stop_gradient(values)
        free = 0.5 * (fixed - batch.returns) ** 2
        reports = {
            "value/loss": jax.lax.stop_gradient(loss),
            "value/mean": fixed,
            "value/clipped": jax.lax.stop_gradient(loss) > free,
        }
        return loss, {name: masked_mean(x, batch.action_mask) for name, x in reports.items()}

    return token_loss(apply, Need.VALUES)
