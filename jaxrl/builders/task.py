"""Loads the task of a run: its prompts and rewards."""

import functools
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxrl.builders.prompts import load_prompts, read_data
from jaxrl.config.training import Config
from jaxrl.data import Example, Prompts, Tokenizer
from jaxrl.environments import RewardTerm, Tool, load_rewards, load_tools
from jaxrl.fleet.rewards import load_remote_rewards, tool_schemas
from jaxrl.fleet.workers import Workers
from jaxrl.huggingface import Checkpoint

MODEL, ENVIRONMENT = "model", "environment"  # the parts of a reward that are not functions
# Metrics reward/... that are not of one part.
_METRICS = {"failed", "kl", "max", "min", "overlong", "p10", "p50", "p90", "std"}


class TaskData(NamedTuple):
    """Prompts and reward functions of a run."""

    tokenizer: Tokenizer  # the policy's
    tools: Mapping[str, Tool]  # of the environment, by name; none if workers play the episodes
    prompts: Prompts  # the training prompts
    held_out: Prompts | None  # the evaluation prompts; None without any
    rewards: Sequence[RewardTerm]  # the reward functions
    # Weight of each part of the reward: the functions by name, then MODEL, then ENVIRONMENT.
    weights: Mapping[str, float]
    judge: RewardTerm | None = None  # the function of judge.path, which nothing trains on


def load_task(
    config: Config, policy: Checkpoint, *, splits: Container[str], workers: Workers | None = None
) -> TaskData:
    """Loads the rewards of a config, and the prompts of each of the splits ("train", "test"). With
    workers, the functions are loaded by them, and the tools too if they play the episodes.

    Raises:
      ValueError: for a tokenizer, data, tools or rewards that cannot be used; it names the key.
    """
    c, tokenizer = config.reward, policy.tokenizer
    tools, load_functions = dict[str, Tool](), load_rewards
    if workers is not None:
        load_functions = functools.partial(load_remote_rewards, workers)
    if workers is not None and plays_in_workers(config):
        schemas = tool_schemas(workers, config.environment.tools)
    else:
        tools = load_tools(config.environment.tools)
        schemas = [tool.schema for tool in tools.values()]
    prompts, held_out = Prompts((), 0), None
    load = functools.partial(load_prompts, config.data, tokenizer, tools=schemas)
    if "train" in splits:
        prompts = load(rows=read_data(config.data.path, key="data.path"))
    if "test" in splits and (path := config.data.eval_path) is not None:
        rows = read_data(path, split="test", key="data.eval_path")
        held_out = load(rows=rows, limit=config.data.eval_limit)
    if config.environment.name is None:
        examples = itertools.chain(prompts.examples, held_out.examples if held_out else ())
        _check_lengths(config, examples, policy=policy)
    rewards = load_functions(c.path, c.function_weights, timeout=c.timeout)
    further: dict[str, float] = {}
    if c.model is not None:
        further[MODEL] = c.model_weight
    if config.environment.name is not None:
        further[ENVIRONMENT] = 1.0
    weights = {reward.name: reward.weight for reward in rewards}
    if taken := sorted(weights.keys() & (further.keys() | _METRICS)):
        raise ValueError(
            f"reward.path names a function {taken[0]!r}, and reward/{taken[0]} is a metric of "
            "something else; rename the function"
        )
    weights |= further
    judge = None
    if config.judge.path is not None and not config.judge.by_hand:
        (judge,) = load_functions((config.judge.path,), timeout=c.timeout, key="judge.path")
    return TaskData(tokenizer, tools, prompts, held_out, rewards, weights, judge)


def plays_in_workers(config: Config) -> bool:
    """Tells if the workers of a fleet, if there are any, play whole groups: they need servers. With
    another sampler they only compute rewards."""
    return config.sampler.name == "vllm"


def _check_lengths(config: Config, examples: Iterable[Example], *, policy: Checkpoint) -> None:
    """Refuses prompts whose completions the model cannot hold, before anything is compiled."""
    longest = max((len(example.tokens) for example in examples), default=0)
    positions = policy.config.max_positions
    if longest + config.sampling.max_tokens > positions:
        raise ValueError(
            f"a prompt of {longest} tokens and sampling.max_tokens = {config.sampling.max_tokens} "
            f"are more than the {positions} positions of {policy.directory}; lower "
            "sampling.max_tokens, or data.max_prompt_tokens, which skips long prompts"
        )
