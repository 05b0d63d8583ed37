"""Dynamic sampling (DAPO, arXiv:2503.14476): what there is to choose from, and what is kept.

A group of answers that all earned the same teaches nothing. Where the loop draws more prompts until
a batch is full of groups that do teach something, those left over wait here for the next step.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.batch import Episode, Rollout


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


def encode(rollout: Rollout) -> dict[str, Any]:
    """An answer as JSON, bit for bit."""
    return {
        name: [value.dtype.name, base64.b64encode(value.tobytes()).decode(), *value.shape[1:]]
        if isinstance(value, np.ndarray)
        else value
        for name, value in rollout._asdict().items()
    }


def decode(content: Mapping[str, Any]) -> Rollout:
    """The inverse of `encode`."""
    fields: dict[str, Any] = dict(content)
    for name in ("prompt", "completion", "logprobs", "action_mask", "version", "experts"):
        if fields.get(name) is not None:
            dtype, data, *rest = fields[name]
            fields[name] = np.frombuffer(base64.b64decode(data), dtype).reshape(-1, *rest)
    fields["components"] = tuple(fields["components"])
    if fields.get("episode") is not None:
        turns, end, numbers = fields["episode"]
        fields["episode"] = Episode(tuple(map(tuple, turns)), end, numbers)
    return Rollout(**fields)


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Answers by prompt, in the order in which the prompts first occur."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.group, []).append(rollout)
    return list(found.values())


def _teaches(group: Sequence[Rollout]) -> bool:
    known = {r.reward for r in group if not np.isnan(r.reward)}
    return len(known) > 1 and any(r.action_mask.any() for r in group)
