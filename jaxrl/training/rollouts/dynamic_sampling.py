"""Dynamic sampling (DAPO, arXiv:2503.14476): keeps the groups whose rewards differ.

A group whose rollouts all have the same reward has no advantages and so no policy gradient. The
loop samples more prompts until a batch is full of other groups; surplus groups wait for the next
step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout


class Split(NamedTuple):
    """Rollouts divided at the size of a batch.

    Attributes:
      batch: those to train on now.
      kept: those for the next step.
    """

    batch: list[Rollout]
    kept: list[Rollout]


def informative(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rollouts, in their order, of groups whose known rewards differ and that hold an
    action token."""
    return [r for group in _groups(rollouts) if _is_informative(group) for r in group]


def split_groups(rollouts: Sequence[Rollout], *, groups: int) -> Split:
    """Splits the rollouts after the first `groups` groups."""
    found = _groups(rollouts)
    first, rest = found[:groups], found[groups:]
    return Split([r for group in first for r in group], [r for group in rest for r in group])


def count_groups(rollouts: Sequence[Rollout]) -> int:
    """Counts the prompts that the rollouts belong to."""
    return len({r.group for r in rollouts})


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Groups rollouts by prompt, in the order in which the prompts first occur."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.group, []).append(rollout)
    return list(found.values())


def _is_informative(group: Sequence[Rollout]) -> bool:
    known = {r.reward for r in group if not np.isnan(r.reward)}
    return len(known) > 1 and any(r.action_mask.any() for r in group)
