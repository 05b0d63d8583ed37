"""Trial calls of a run's rewards and environment, before the model is loaded."""

import json
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl.builders.task import TaskData
from jaxrl.config.training import Config
from jaxrl.data import Example
from jaxrl.environments import (
    EpisodeRunner,
    LockstepScheduler,
    RewardTerm,
    environment_reward,
    score,
)
from jaxrl.sampling import Completion, Sampler, SamplingParams, Turn

_SHOWN = 40  # characters of a completion


def try_task(
    config: Config,
    task: TaskData,
    runner: EpisodeRunner | None,
    *,
    rewards: Sequence[RewardTerm],
    params: SamplingParams,
) -> list[str]:
    """Scores two completions of the first row, its reference answer and "", with each of `rewards`
    and with the environment of `runner`, if there is one.

    Returns:
      Lines such as `first row: score("932") = 1.0, score("") = 0.0`; none without prompts.

    Raises:
      ValueError: if a reward with a weight, or the environment, fails on both. Without a reference
        answer a failure on "" is only shown: a function may refuse an empty completion.
    """
    if (example := first_example(task)) is None:
        return []
    texts = [*([str(example["answer"])] if "answer" in example else []), ""]
    lines = [_try_reward(config, term, example, texts=texts) for term in rewards]
    if runner is not None:
        lines += _try_environment(config, task, runner, example=example, texts=texts, params=params)
    return lines


def first_example(task: TaskData) -> Example | None:
    """Returns the first row of a task; None without prompts."""
    held_out = task.held_out.examples if task.held_out is not None else ()
    return next(iter([*task.prompts.examples[:1], *held_out[:1]]), None)


def _try_reward(config: Config, term: RewardTerm, example: Example, *, texts: Sequence[str]) -> str:
    scored = [score([term], [text], [example]) for text in texts]
    failures = [one.first_failure for one in scored if one.first_failure is not None]
    if len(failures) == len(texts) > 1 and term.weight:
        named = [("reward.path", path) for path in config.reward.path]
        named.append(("judge.path", config.judge.path or ""))
        key, path = next(one for one in named if one[1].rpartition(":")[2] == term.name)
        raise ValueError(
            f"{key} = {path!r}: on the first row of the data, {failures[0]}; correct the "
            "function, or the row"
        )
    values = [float(one.components[term.name][0]) for one in scored]
    return _line(term.name, texts, values, failure=next(iter(failures), None))


def _try_environment(
    config: Config,
    task: TaskData,
    runner: EpisodeRunner,
    *,
    example: Example,
    texts: Sequence[str],
    params: SamplingParams,
) -> Iterator[str]:
    """Plays an episode of one turn for each text."""
    end = next(iter(params.stop), ())
    turns = [[*task.tokenizer.encode(text, add_special_tokens=False), *end] for text in texts]
    limits = runner.limits._replace(max_turns=1)
    played = runner._replace(limits=limits, scheduler=LockstepScheduler).run(
        {0: example}, sampler=_Scripted(turns), params=params, group_size=len(turns)
    )
    name, failed = config.environment.name, [r.episode.failed for r in played.rollouts if r.episode]
    if all(failed) and len(texts) > 1:
        raise ValueError(
            f"environment.name = {name!r}: on the first row of the data, {played.first_failure}; "
            "correct the environment, or the row"
        )
    earned = [environment_reward(rollout) for rollout in played.rollouts]
    values = [float("nan") if bad else value for bad, value in zip(failed, earned, strict=True)]
    yield _line("environment", texts, values, failure=played.first_failure)


def _line(name: str, texts: Sequence[str], values: Sequence[float], *, failure: str | None) -> str:
    calls = [
        f"{name}({_quoted(text)}) {'failed' if np.isnan(value) else f'= {round(value, 6) + 0.0}'}"
        for text, value in zip(texts, values, strict=True)
    ]
    return "; ".join(filter(None, [f"first row: {', '.join(calls)}", failure]))


def _quoted(text: str) -> str:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return json.dumps(shown, ensure_ascii=False)


class _Scripted(Sampler):
    """Answers with given token ids, by the index of the sample."""

    version = 0

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = turns

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        for turn in turns:
            tokens = np.asarray(self._turns[turn.sample_index], np.int32)
            zeros = np.zeros(len(tokens))
            logprobs, versions = zeros.astype(np.float32), zeros.astype(np.int32)
            yield Completion(
                turn.prompt_index, turn.sample_index, tokens, logprobs, versions, "stop"
            )

    def close(self) -> None:
        """Does nothing: no thread samples from it."""
