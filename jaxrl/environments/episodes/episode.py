"""One episode as it grows: token ids are appended and nothing is ever tokenised again."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from jaxrl.core.batch import End, Episode, Rollout
from jaxrl.environments.episodes.base import BrokenError, Limits, Step
from jaxrl.sampling.base import Completion, Turn


class Draft:
    """What an episode has come to: a prompt, turns of the policy, and observations between."""

    def __init__(self, prompt: np.ndarray, *, prompt_index: int, sample_index: int) -> None:
        """An episode of which only the prompt is known, i32[P]."""
        self._prompt = prompt
        self._seat = (prompt_index, sample_index)
        self._length, self._cut = 0, False
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._chosen: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._turns: list[tuple[int, int, float]] = []
        self._experts: np.ndarray | None = None
        self._numbers: dict[str, float] = {}

    def turn(self, limits: Limits) -> Turn:
        """What the policy is asked for next."""
        context = np.concatenate([self._prompt, *self._tokens])
        return Turn(context, *self._seat, limits.tokens - self._length, len(self._prompt))

    def take(self, completion: Completion) -> None:
        """Appends a turn of the policy."""
        chosen, start = np.ones(len(completion.tokens), bool), self._length
        self._append(completion.tokens, completion.logprobs, chosen, completion.versions)
        self._turns.append((start, self._length, 0.0))
        self._cut = completion.finish_reason == "length"
        if self._experts is None or completion.experts is None:
            self._experts = completion.experts
        else:
            # What was seen of the context when it was drawn counts, not what is computed again.
            new = completion.experts[len(self._experts) :]
            self._experts = np.concatenate([self._experts, new])

    def see(self, step: Step, limits: Limits) -> End | None:
        """Takes what the environment says to the last turn, as `check_step` returns it.

        Returns:
          How the episode ends, None if it goes on. A last observation, to which there will be no
          turn, is left out.
        """
        self._turns[-1] = (*self._turns[-1][:2], step.reward)
        for name, value in step.numbers.items():
            self._numbers[name] = self._numbers.get(name, 0.0) + value
        if self._cut:
            return "tokens"
        if step.done:
            return "done"
        if len(self._turns) == limits.turns:
            return "turns"
        seen = len(step.observation)
        if self._length + seen >= limits.tokens:
            return "tokens"
        version = self._versions[-1][-1]
        self._append(
            np.asarray(step.observation, np.int32),
            np.zeros(seen, np.float32),
            np.zeros(seen, bool),
            np.full(seen, version, np.int32),
        )
        return None

    def rollout(self, end: End, *, group: int) -> Rollout:
        """The episode, without its reward. Nothing is learnt from a broken one."""
        episode = Episode(tuple(self._turns), end, self._numbers)
        chosen = np.concatenate([np.zeros(0, bool), *self._chosen])
        return Rollout(
            prompt=self._prompt,
            completion=np.concatenate([np.zeros(0, np.int32), *self._tokens]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self._logprobs]),
            action_mask=chosen & (not episode.broken),
            version=np.concatenate([np.zeros(0, np.int32), *self._versions]),
            group=group,
            truncated=end in ("tokens", "turns"),
            episode=episode,
            experts=self._experts,
        )

    def _append(self, tokens, logprobs, chosen, versions) -> None:
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._chosen.append(chosen)
        self._versions.append(versions)
        self._length += len(tokens)


def last_turn(rollout: Rollout) -> np.ndarray:
    """The tokens of the policy's last turn, i32[C]: the whole completion if there was only one."""
    if rollout.episode is None or not rollout.episode.turns:
        return rollout.completion
    start, end, _ = rollout.episode.turns[-1]
    return rollout.completion[start:end]


def earned(rollout: Rollout) -> float:
    """What the environment gave for all turns together."""
    return sum(reward for _, _, reward in rollout.episode.turns) if rollout.episode else 0.0


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How episodes went, nothing without any: turns, how many ended in which way, and means of what
    environments counted, over the episodes that are not broken."""
    episodes = [r.episode for r in rollouts if r.episode is not None]
    if not episodes:
        return {}
    whole = [e for e in episodes if not e.broken]
    names = sorted({name for e in whole for name in e.numbers})
    return {
        "turns": float(np.mean([len(e.turns) for e in episodes])),
        **{f"episodes/{end}": float(sum(e.end == end for e in episodes)) for end in get_args(End)},
        **{
            f"environment/{name}": float(np.mean([e.numbers.get(name, 0.0) for e in whole]))
            for name in names
        },
    }


def check_prompt(found: Any, limits: Limits) -> np.ndarray:
    """What `reset` returned as i32[P].

    Raises:
      BrokenError: if it is no prompt that the policy can be given.
    """
    prompt = _ids(found, limits, what="the prompt")
    if not 0 < len(prompt) <= limits.prompt_tokens:
        raise BrokenError(
            "nonsense",
            f"reset returned a prompt of {len(prompt)} tokens, and 1 to data.max_prompt_tokens = "
            f"{limits.prompt_tokens} are allowed",
        )
    return prompt


def check_step(found: Any, limits: Limits) -> Step:
    """What `step` returned, with numbers as Python's.

    Raises:
      BrokenError: if it is no step.
    """
    try:
        return _step(found, limits)
    except BrokenError:
        raise
    except Exception as error:  # whatever a number, an array or a mapping of theirs does when read
        raise BrokenError("nonsense", f"step returned what cannot be read: {error!r}") from error


def _step(found: Any, limits: Limits) -> Step:
    if not isinstance(found, tuple) or not 3 <= len(found) <= 4:
        raise BrokenError("nonsense", f"step returned {found!r:.200}, expected a Step")
    observation, reward, done, numbers = Step(*found)
    if not isinstance(done, (bool, np.bool_)):
        raise BrokenError("nonsense", f"step returned done = {done!r:.200}, expected a bool")
    try:
        values = {"reward": float(reward)} | {str(k): float(v) for k, v in numbers.items()}
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise BrokenError(
            "nonsense", f"step returned reward = {reward!r:.200} and numbers = {numbers!r:.200}"
        ) from None
    for name, value in values.items():
        if not math.isfinite(value):
            raise BrokenError("nonsense", f"step returned {name} = {value}, which is not finite")
    earned = values.pop("reward")
    tokens = () if done else _ids(observation, limits, what="the observation")
    return Step(tokens, earned, bool(done), values)


def _ids(found: Any, limits: Limits, *, what: str) -> np.ndarray:
    try:
        ids = np.asarray(found)
    except Exception as error:
        raise BrokenError("nonsense", f"{what} cannot be read: {error!r}") from error
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise BrokenError("nonsense", f"{what} is {found!r:.200}, expected token ids")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise BrokenError(
            "nonsense",
            f"{what} has token ids from {ids.min()} to {ids.max()}; the policy's are 0 to "
            f"{limits.vocab_size - 1}",
        )
    return ids.astype(np.int32)
