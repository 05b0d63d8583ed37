"""Single-turn rollouts: a prompt, a sampled completion, a reward."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data.messages import read_prompt, read_tools
from jaxrl.data.prompts import prompt_encoder
from jaxrl.data.templates import Rendering, make_renderer
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.diagnostics.accuracy import half_interval
from jaxrl.sampling.base import Completion, Sampler, SamplingParams

_RENDERING = Rendering()


def rollouts(
    sampler: Sampler,
    examples: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    reward: Callable[[str, Mapping[str, Any]], float],
    params: SamplingParams,
    group_size: int,
    rendering: Rendering = _RENDERING,
    temperature: float = 1.0,
) -> list[Rollout]:
    """Samples `group_size` completions of every prompt and rewards each of them.

    Args:
      sampler: samples the completions.
      examples: rows with a "prompt", a text or a list of messages, and maybe with "tools".
      tokenizer: the model's; its chat template renders the prompts if there is one.
      reward: (text of a completion, its example with "rendered_prompt") -> a number.
      params: parameters of sampling.
      group_size: completions per prompt.
      rendering: options that turn prompts into text.
      temperature: the `temperature` of the model that learns from the rollouts.

    Returns:
      The rollouts of each example in turn; `group` is the index of the example.

    Raises:
      ValueError: if `params` have another temperature, or truncate the distribution and the sampler
        does not record what is kept, because the learner's log-probs would be of another
        distribution; for a prompt that cannot be rendered, or as `Sampler.sample`.
    """
    _check_distribution(params, temperature, records_kept=sampler.records_kept)
    render, encode = make_renderer(tokenizer, rendering), prompt_encoder(tokenizer, rendering)
    prompts, known = [], []
    for i, example in enumerate(examples):
        where = f"example {i}"
        prompt = read_prompt(example, "prompt", where=where)
        text = render(prompt, where, tools=read_tools(example, where=where))
        known.append({**example, "rendered_prompt": text})
        prompts.append(np.array(encode(text), np.int32))
    found: dict[tuple[int, int], Rollout] = {}
    for completion in sampler.sample(prompts, params, group_size=group_size):
        i = completion.prompt_index
        text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        rollout = as_rollout(completion, prompts[i], group=i)
        rewarded = rollout._replace(reward=float(reward(text, known[i])))
        found[i, completion.sample_index] = rewarded
    return [found[key] for key in sorted(found)]


class Accuracy(NamedTuple):
    """A mean reward over prompts.

    Attributes:
      mean: of the rewards; for rewards of 0 and 1 the share that is right.
      half_interval: half the width of its 95 % confidence interval; NaN for fewer than two prompts.
    """

    mean: float
    half_interval: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % +- {100 * self.half_interval:.1f}"


def accuracy(
    sampler: Sampler,
    examples: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    reward: Callable[[str, Mapping[str, Any]], float],
    params: SamplingParams,
    rendering: Rendering = _RENDERING,
) -> Accuracy:
    """Samples one greedy completion of every prompt and returns their mean reward.

    Args:
      sampler: samples the completions.
      examples: rows that were not trained on, as for `rollouts`.
      tokenizer: as for `rollouts`.
      reward: as for `rollouts`.
      params: parameters of sampling; their temperature is taken as 0.
      rendering: options that turn prompts into text.

    Raises:
      ValueError: for no examples, a prompt that cannot be rendered, or as `Sampler.sample`.
    """
    if not examples:
        raise ValueError("examples is empty; the mean of no rewards is not defined")
    greedy = dataclasses.replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    played = rollouts(
        sampler,
        examples,
        tokenizer=tokenizer,
        reward=reward,
        params=greedy,
        group_size=1,
        rendering=rendering,
        temperature=greedy.temperature,
    )
    rewards = np.array([[rollout.reward] for rollout in played])
    return Accuracy(float(rewards.mean()), half_interval(rewards))


def _check_distribution(params: SamplingParams, temperature: float, *, records_kept: bool) -> None:
    """Raises ValueError unless a learner at this temperature scores what `params` sample."""
    if params.temperature != temperature:
        raise ValueError(
            f"temperature={params.temperature:g}: the learner computes log-probs at temperature "
            f"{temperature:g}, so ratios would compare two distributions. To train at T, sample "
            "at T, give the learner model._replace(temperature=T) and pass temperature=T to "
            "`rollouts`; to evaluate, use `jaxrl.accuracy`"
        )
    for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if (value := getattr(params, name)) != whole and not records_kept:
            raise ValueError(
                f"{name}={value:g}: the learner computes log-probs over all tokens, so ratios "
                f"would compare two distributions; leave {name} at {whole:g} (to evaluate, use "
                "`Sampler.sample`), or make the sampler with record_kept=True"
            )


def as_rollout(
    completion: Completion, prompt: np.ndarray, *, group: int, mask_truncated: bool = False
) -> Rollout:
    """Returns a rollout of a completion, without its reward. All tokens are actions, but none if it
    is truncated and `mask_truncated`."""
    truncated = completion.finish_reason == "length"
    return Rollout(
        prompt=prompt,
        completion=completion.tokens,
        logprobs=completion.logprobs,
        action_mask=np.full(len(completion.tokens), not (truncated and mask_truncated)),
        version=completion.versions,
        group=group,
        truncated=truncated,
        experts=completion.experts,
        kept=completion.kept,
    )
