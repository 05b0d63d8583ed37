"""A rollout source with a sampler and a reward written by hand."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from jaxrl.builders.task import TaskData
from jaxrl.config.training import Config
from jaxrl.data.prompts import Example, Prompts
from jaxrl.environments.rewards.score import Reward
from jaxrl.sampling.base import SamplingParams
from jaxrl.training.rollouts.generate import RolloutSource


def make_source(
    config: Config,
    prompts: Sequence[Example],
    *,
    sampler: Any,
    reward: Callable[[str, Any], float],
    note: Callable[[str], None] = print,
) -> RolloutSource:
    """The text of a completion is its token ids, separated by spaces."""
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    rewards = [Reward("earned", reward, 1.0)]
    return RolloutSource(
        config=config,
        task=TaskData(tokenizer, {}, Prompts(prompts, 0), None, rewards, {"earned": 1.0}),
        sampler=sampler,
        params=SamplingParams(max_tokens=2),
        episode_runner=None,
        reward_model=None,
        teacher=None,
        note=note,
    )
