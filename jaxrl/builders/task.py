"""Loads the task of a run: its prompts and rewards."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrl.builders.prompts import load_held_out_prompts, load_training_prompts
from jaxrl.config.training import Config
from jaxrl.data.prompts import Prompts, Tokenizer
from jaxrl.environments.rewards.scoring import Reward, load_rewards
from jaxrl.environments.tools.schema import Tool, load_tools
from jaxrl.models import huggingface


class TaskData(NamedTuple):
    """Prompts and reward functions of a run.

    Attributes:
      tokenizer: the policy's.
      tools: of the environment, by name.
      prompts: the training prompts.
      held_out: the evaluation prompts; None without any.
      rewards: the reward functions.
    """

    tokenizer: Tokenizer
    tools: Mapping[str, Tool]
    prompts: Prompts
    held_out: Prompts | None
    rewards: Sequence[Reward]


def load_task(config: Config, *, with_prompts: bool) -> TaskData:
    """Loads the prompts and rewards that the config names.

    Args:
      config: of the run.
      with_prompts: false on processes that sample nothing, which read no data.

    Raises:
      ValueError: for a tokenizer, data, tools or rewards that cannot be used; the message names
        the key.
    """
    tokenizer = huggingface.load_tokenizer(config.model.path)
    tools = load_tools(config.environment.tools)
    prompts, held_out = Prompts((), 0), None
    if with_prompts:
        prompts = load_training_prompts(config.data, tokenizer, tools=tools.values())
        held_out = load_held_out_prompts(config.data, tokenizer, tools=tools.values())
    rewards = load_rewards(
        config.reward.path, config.reward.function_weights, timeout=config.reward.timeout
    )
    return TaskData(tokenizer, tools, prompts, held_out, rewards)
