"""Dynamic sampling (DAPO, arXiv:2503.14476): keeps the groups whose rewards differ.

A group whose rollouts all have the same reward has no advantages and so no policy gradient. The
loop samples more prompts until a batch is full of other groups; surplus groups wait for the next
step.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.core import Rollout, by_group


def informative(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rollouts, in order, of groups with different known rewards and action tokens."""
    groups = by_group(rollouts).values()
    return [r for group in groups if _is_informative(group) for r in group]


def split_groups(
    rollouts: Sequence[Rollout], *, groups: int
) -> tuple[list[Rollout], list[Rollout]]:
    """Splits the rollouts after the first `groups` groups."""
    found = list(by_group(rollouts).values())
    return [r for g in found[:groups] for r in g], [r for g in found[groups:] for r in g]


def count_groups(rollouts: Sequence[Rollout]) -> int:
    """Counts the prompts that the rollouts belong to."""
    return len({r.group for r in rollouts})


def _is_informative(group: Sequence[Rollout]) -> bool:
    known = {r.reward for r in group if not np.isnan(r.reward)}
    return len(known) > 1 and any(r.action_mask.any() for r in group)
