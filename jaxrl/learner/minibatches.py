"""Minibatches from rewarded rollouts."""

from collections.abc import Sequence

import numpy as np

from jaxrl.advantages import AdvantageEstimator, Outcomes, estimate
from jaxrl.core.batch import Minibatch, Rollout, chains
from jaxrl.core.buckets import length_bucket
from jaxrl.core.packing import MinibatchShape, pack_minibatch

_TOKENS = 4096  # of a microbatch by default


def minibatch(
    rollouts: Sequence[Rollout],
    advantages: AdvantageEstimator,
    *,
    row_length: int | None = None,
    rows_per_microbatch: int | None = None,
) -> Minibatch:
    """Estimates advantages and packs rollouts into rows.

    The minibatch has room for one rollout per row, so the learner's step compiles once per number
    of rollouts. A rollout with branches is several sequences, which share its advantage. The
    rewards of an episode's turns are parts of its reward.

    Args:
      rollouts: N rollouts with their rewards.
      advantages: rewards and groups -> advantages, such as `recipe.advantages`.
      row_length: tokens in a row; by default the longest rollout's, rounded up so that few programs
        are compiled.
      rows_per_microbatch: rows the learner computes at once; by default up to 4,096 tokens.

    Raises:
      ValueError: if a rollout is longer than a row; the message names it.
    """
    whole = [chains(rollout) for rollout in rollouts]
    episodes = np.repeat(np.arange(len(whole)), [len(one) for one in whole])
    rollouts = [one for found in whole for one in found]
    if row_length is None:
        row_length = length_bucket(max(r.length for r in rollouts), step=16)
    turns = None
    if any(r.episode is not None for r in rollouts):
        single = [((0, len(r.completion), 0.0),) for r in rollouts]
        turns = [
            r.episode.turns if r.episode else one for r, one in zip(rollouts, single, strict=True)
        ]
    outcomes = Outcomes(
        # The reward of an episode of several sequences counts once.
        rewards=np.where(np.diff(episodes, append=-1) != 0, [r.reward for r in rollouts], 0.0),
        groups=np.array([r.group for r in rollouts]),
        action_masks=[r.action_mask for r in rollouts],
        turns=turns,
        episodes=episodes if len(rollouts) > len(whole) else None,
    )
    if rows_per_microbatch is None:
        rows_per_microbatch = max(1, min(len(rollouts), _TOKENS // row_length))
    shape = MinibatchShape(
        row_length=row_length, rows_per_microbatch=rows_per_microbatch, max_rows=len(rollouts)
    )
    return pack_minibatch(rollouts, list(estimate(advantages, outcomes)), shape=shape)
