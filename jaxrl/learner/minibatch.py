"""Makes mini-batches from rewarded rollouts."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import AdvantageEstimator, Outcomes, estimate
from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.packing import assign_rows, interleave, pack


def minibatch(
    rollouts: Sequence[Rollout],
    advantages: AdvantageEstimator,
    *,
    row_length: int,
    rows_per_microbatch: int,
) -> Minibatch:
    """Estimates advantages and packs rollouts into rows.

    The mini-batch has room for one rollout to a row, so that the learner's step compiles once for
    every mini-batch of as many rollouts.

    Args:
      rollouts: N rollouts with their rewards.
      advantages: rewards and groups -> advantages, such as `recipe.advantages`.
      row_length: tokens in a row; at least those of the longest rollout.
      rows_per_microbatch: rows that the learner computes at once.

    Raises:
      ValueError: for a rollout that is longer than a row; the message names it.
    """
    outcomes = Outcomes(
        rewards=np.array([r.reward for r in rollouts]),
        groups=np.array([r.group for r in rollouts]),
        action_masks=[r.action_mask for r in rollouts],
    )
    rows, used = interleave(
        assign_rows([r.length for r in rollouts], row_length=row_length),
        rows_per_microbatch=rows_per_microbatch,
        max_microbatches=-(-len(rollouts) // rows_per_microbatch),
    )
    found = list(estimate(advantages, outcomes))
    batch = pack(rollouts, found, rows=rows, row_length=row_length)
    return Minibatch(batch=jax.tree.map(jnp.asarray, batch), microbatches=jnp.int32(used))
