"""Dynamic sampling (DAPO, arXiv:2503.14476): what there is to choose from, and what is kept.

A group of answers that all earned the same teaches nothing. Where the loop draws more prompts until
a batch is full of groups that do teach something, those left over wait here for the next step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout


class Choice(NamedTuple):
    """What becomes of the answers at hand.

    Attributes:
      batch: to be learnt from now.
      kept: for the next step.
    """

    batch: list[Rollout]
    kept: list[Rollout]


def teaching(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The answers of groups whose known rewards are not all equal and that hold an action token, in
    their order."""
    return [r for group in _groups(rollouts) if _teaches(group) for r in group]


def choose(rollouts: Sequence[Rollout], *, groups: int) -> Choice:
    """The answers of the first `groups` groups, and the others."""
    found = _groups(rollouts)
    first, rest = found[:groups], found[groups:]
    return Choice([r for group in first for r in group], [r for group in rest for r in group])


def count_groups(rollouts: Sequence[Rollout]) -> int:
    """Number of prompts that the answers belong to."""
    return len({r.group for r in rollouts})


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Answers by prompt, in the order in which the prompts first occur."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.group, []).append(rollout)
    return list(found.values())


def _teaches(group: Sequence[Rollout]) -> bool:
    known = {r.reward for r in group if not np.isnan(r.reward)}
    return len(known) > 1 and any(r.action_mask.any() for r in group)
