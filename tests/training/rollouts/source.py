"""A rollout source with a sampler and a reward written by hand."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from jaxrl.config.training import Config
from jaxrl.data.prompts import Example
from jaxrl.environments.rewards.scoring import Reward
from jaxrl.sampling.base import SamplingParams
from jaxrl.training.rollouts.collect import RolloutSource
from jaxrl.training.rollouts.generate import Generator
from jaxrl.training.rollouts.score import Scorer


def make_source(
    config: Config,
    prompts: Sequence[Example],
    *,
    sampler: Any,
    reward: Callable[[str, Any], float],
    note: Callable[[str], None],
) -> RolloutSource:
    """The text of a completion is its token ids, separated by spaces."""
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    generator = Generator(
        sampler=sampler,
        params=SamplingParams(max_tokens=2),
        episode_runner=None,
        mask_truncated=config.train.mask_truncated,
        note=note,
    )
    scorer = Scorer([Reward("earned", reward, 1.0)], None, {"earned": 1.0}, tokenizer, note)
    return RolloutSource(prompts, config.seed, generator, scorer)
