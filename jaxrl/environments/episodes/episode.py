"""One episode as token ids: turns and observations are appended and never re-tokenised."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np

from jaxrl.core.batch import End, Episode, Rollout
from jaxrl.core.kept import RECORD
from jaxrl.environments.episodes.base import EpisodeError, EpisodeLimits, Step
from jaxrl.sampling.base import Completion, Turn, TurnCache

_invalid = functools.partial(EpisodeError, "invalid")


class EpisodeBuilder:
    """An episode in progress: a prompt, then turns of the policy with observations between them."""

    def __init__(self, prompt: np.ndarray, index: tuple[int, int]) -> None:
        """Begins an episode from token ids i32[P]. The random numbers depend on the index of prompt
        and sample."""
        self._prompt, self._index = prompt, index
        self._length, self._truncated = 0, False
        # Tokens, log-probs, action mask and versions of each turn or observation.
        self._chunks = [tuple(np.zeros(0, t) for t in (np.int32, np.float32, bool, np.int32))]
        self._turns: list[tuple[int, int, float]] = []
        self._experts: np.ndarray | None = None
        # Of each chunk, if truncated sampling records the tokens that it kept.
        self._kept: list[np.ndarray | None] = [np.zeros((0, RECORD), np.uint8)]
        self._metrics: dict[str, float] = {}

    def next_turn(self, limits: EpisodeLimits, cache: TurnCache) -> Turn:
        """Returns the request for the policy's next turn; all turns share `cache`."""
        context = np.concatenate([self._prompt, *(tokens for tokens, *_ in self._chunks)])
        remaining = limits.max_tokens - self._length
        return Turn(context, *self._index, remaining, len(self._prompt), cache)

    def add_completion(self, completion: Completion) -> None:
        """Appends a turn of the policy."""
        actions, start = np.ones(len(completion.tokens), bool), self._length
        self._chunks.append((completion.tokens, completion.logprobs, actions, completion.versions))
        self._kept.append(completion.kept)
        self._length += len(completion.tokens)
        self._turns.append((start, self._length, 0.0))
        self._truncated = completion.finish_reason == "length"
        if self._experts is None or completion.experts is None:
            self._experts = completion.experts
        else:
            # Keeps the experts that drew the context; the sampler has computed the context again.
            new = completion.experts[len(self._experts) :]
            self._experts = np.concatenate([self._experts, new])

    def add_step(self, step: Step, limits: EpisodeLimits) -> End | None:
        """Adds the environment's response to the last turn, as `check_step` returns it.

        Returns the end of the episode, or None if it continues. Drops an observation that leaves no
        room for a turn.
        """
        self._turns[-1] = (*self._turns[-1][:2], step.reward)
        for name, value in step.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        if self._truncated:
            return "max_tokens"
        if step.done:
            return "done"
        if len(self._turns) == limits.max_turns:
            return "max_turns"
        size = len(step.observation)
        if self._length + size >= limits.max_tokens:
            return "max_tokens"
        tokens, version = np.asarray(step.observation, np.int32), self._chunks[-1][3][-1]
        logprobs, actions = np.zeros(size, np.float32), np.zeros(size, bool)
        self._chunks.append((tokens, logprobs, actions, np.full(size, version, np.int32)))
        self._kept.append(np.zeros((size, RECORD), np.uint8))
        self._length += size
        return None

    def build(self, end: End, *, group: int) -> Rollout:
        """Returns the rollout, without rewards of reward functions. The action mask of a failed
        episode is empty, so training ignores it."""
        episode = Episode(tuple(self._turns), end, self._metrics)
        kept = [part for part in self._kept if part is not None]
        tokens, logprobs, actions, versions = map(np.concatenate, zip(*self._chunks, strict=True))
        return Rollout(
            prompt=self._prompt,
            completion=tokens,
            logprobs=logprobs,
            action_mask=actions & (not episode.failed),
            version=versions,
            group=group,
            truncated=end in ("max_tokens", "max_turns"),
            episode=episode,
            experts=self._experts,
            kept=np.concatenate(kept) if len(kept) == len(self._kept) > 1 else None,
        )


def last_turn(rollout: Rollout) -> np.ndarray:
    """Returns the token ids of the policy's last turn, i32[C]; without turns, the completion."""
    if rollout.episode is None or not rollout.episode.turns:
        return rollout.completion
    start, end, _ = rollout.episode.turns[-1]
    return rollout.completion[start:end]


def environment_reward(rollout: Rollout) -> float:
    """Returns the sum of the environment's rewards over the turns; 0 without an environment."""
    return sum(reward for _, _, reward in rollout.episode.turns) if rollout.episode else 0.0


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Summarizes episodes; returns {} if there are none.

    Returns:
      "turns", mean turns of an episode; "episodes/END", number of episodes with that end;
      "environment/NAME", mean of each metric of the environment over episodes that did not fail.
    """
    episodes = [r.episode for r in rollouts if r.episode is not None]
    if not episodes:
        return {}
    whole = [e for e in episodes if not e.failed]
    names = sorted({name for e in whole for name in e.metrics})
    return {
        "turns": float(np.mean([len(e.turns) for e in episodes])),
        **{f"episodes/{end}": float(sum(e.end == end for e in episodes)) for end in get_args(End)},
        **{
            f"environment/{name}": float(np.mean([e.metrics.get(name, 0.0) for e in whole]))
            for name in names
        },
    }


def check_prompt(returned: Any, limits: EpisodeLimits) -> np.ndarray:
    """Converts the result of `reset` to a prompt, i32[P]; raises EpisodeError if it is invalid."""
    with _reading("the prompt"):
        prompt = _token_ids(returned, limits, what="the prompt")
    if not 0 < len(prompt) <= limits.max_prompt_tokens:
        raise _invalid(
            f"reset returned a prompt of {len(prompt)} tokens; return 1 to "
            f"data.max_prompt_tokens = {limits.max_prompt_tokens}"
        )
    return prompt


def check_step(returned: Any, limits: EpisodeLimits) -> Step:
    """Converts the result of `step` to Python's numbers; raises EpisodeError if it is invalid."""
    with _reading("the result of step"):
        if not isinstance(returned, tuple) or not 3 <= len(returned) <= 4:
            raise _invalid(f"step returned {returned!r:.200}, expected a Step")
        observation, reward, done, metrics = Step(*returned)
        if not isinstance(done, (bool, np.bool_)):
            raise _invalid(f"step returned done = {done!r:.200}, expected a bool")
        try:
            earned, values = float(reward), {str(k): float(v) for k, v in metrics.items()}
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise _invalid(
                f"step returned reward = {reward!r:.200} and metrics = {metrics!r:.200}, "
                "expected numbers"
            ) from None
        for name, value in (("reward", earned), *values.items()):
            if not math.isfinite(value):
                raise _invalid(f"step returned {name} = {value}, which is not finite")
        tokens = () if done else _token_ids(observation, limits, what="the observation")
        return Step(tokens, earned, bool(done), values)


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turns exceptions of a user's numbers, arrays and mappings into `EpisodeError`."""
    try:
        yield
    except EpisodeError:
        raise
    except Exception as error:
        raise _invalid(f"{what} cannot be read: {error!r}") from error


def _token_ids(returned: Any, limits: EpisodeLimits, *, what: str) -> np.ndarray:
    ids = np.asarray(returned)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise _invalid(f"{what} is {returned!r:.200}, expected token ids")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise _invalid(
            f"{what} has token ids from {ids.min()} to {ids.max()}; the policy's range from 0 to "
            f"{limits.vocab_size - 1}"
        )
    return ids.astype(np.int32)
