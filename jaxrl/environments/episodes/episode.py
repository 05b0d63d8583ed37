"""One episode as token ids: turns and observations are appended and never re-tokenised."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from jaxrl.core.batch import End, Episode, Rollout
from jaxrl.core.kept import RECORD
from jaxrl.environments.episodes.base import EpisodeError, EpisodeLimits, Step
from jaxrl.sampling.base import Completion, Turn, TurnCache

_invalid = functools.partial(EpisodeError, "invalid")
_BEGIN = Step()


class _Turn(NamedTuple):
    """A turn of the policy, and what it has read since the turn before it."""

    after: int  # number of the turn before it; -1 for the first of a sequence
    read: np.ndarray  # i32[N]: a prompt, or an observation
    completion: Completion
    reward: float = 0.0


class EpisodeBuilder:
    """An episode in progress: a prompt, then turns of the policy with observations between them.

    A turn follows any earlier one, or begins a sequence of its own; usually it follows the last.
    """

    def __init__(self, prompt: np.ndarray, index: tuple[int, int], begin: Step = _BEGIN) -> None:
        """Begins an episode from token ids i32[P]. The random numbers depend on the index of prompt
        and sample; `begin` has the limits of the first turn."""
        self._prompt, self._index = prompt, index
        self._next = begin._replace(observation=prompt, after=-1)
        self._turns: list[_Turn] = []
        self._truncated = self._limited = False
        self._metrics: dict[str, float] = {}

    def next_turn(self, limits: EpisodeLimits, cache: TurnCache) -> Turn:
        """Returns the request for the policy's next turn; all turns share `cache`."""
        step, before = self._next, self._sequence(self._next.after)
        said = [part for turn in before for part in (turn.read, turn.completion.tokens)]
        context = np.concatenate([*said, np.asarray(step.observation, np.int32)])
        prompt = len(before[0].read) if before else len(context)
        left = limits.max_tokens - (len(context) - prompt)
        self._limited = step.max_tokens is not None and step.max_tokens < left
        most = step.max_tokens if self._limited and step.max_tokens is not None else left
        return Turn(context, *self._index, most, prompt, cache)

    def add_completion(self, completion: Completion) -> np.ndarray:
        """Appends a turn of the policy, and returns its token ids, cut where the step ends it.

        Raises:
          EpisodeError: if the step's `stop` fails, in which case the turn is not appended.
        """
        completion, step = _cut(completion, self._next), self._next
        assert step.after is not None
        read = np.asarray(step.observation, np.int32)
        self._turns.append(_Turn(step.after, read, completion))
        # A turn that ends at a limit of its own leaves room for more.
        self._truncated = completion.finish_reason == "length" and not self._limited
        return completion.tokens

    def add_step(self, step: Step, limits: EpisodeLimits) -> End | None:
        """Adds the environment's response to the last turn, as `check_step` returns it.

        Returns the end of the episode, or None if it continues. Drops an observation that leaves no
        room for a turn.

        Raises:
          EpisodeError: if the step follows a turn that is not there, or begins with a prompt of the
            wrong length.
        """
        last = len(self._turns) - 1
        self._turns[last] = self._turns[last]._replace(reward=step.reward)
        for name, value in step.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        after, size = last if step.after is None else step.after, len(step.observation)
        if self._truncated and (step.done or after == last):
            return "max_tokens"
        if step.done:
            return "done"
        if len(self._turns) == limits.max_turns:
            return "max_turns"
        if not -1 <= after <= last:
            raise _invalid(f"step returned after = {after}; the turns are 0 to {last}")
        if after < 0:
            _check_length(size, limits, "step")
        elif self._length(after) + size >= limits.max_tokens:
            return "max_tokens"
        self._next = step._replace(after=after)
        return None

    def build(self, end: End, *, group: int) -> Rollout:
        """Returns the rollout, without rewards of reward functions: the sequence of the last turn,
        with the others as its branches. The action mask of a failed episode is empty, so training
        ignores it."""
        followed = {turn.after for turn in self._turns}
        # Without turns there is one sequence, the prompt.
        leaves = [i for i in range(len(self._turns)) if i not in followed] or [-1]
        episode, trained = Episode((), end, self._metrics), set[int]()
        built = list[Rollout]()
        for leaf in leaves:
            one = self._build(leaf, episode, trained=trained)
            built.append(one._replace(group=group))
        *branches, rollout = built
        return rollout._replace(branches=() if episode.failed else tuple(branches))

    def _build(self, leaf: int, episode: Episode, *, trained: set[int]) -> Rollout:
        """Builds the sequence that ends with a turn. Turns in `trained` are no actions; the others
        are added to it."""
        # Tokens, log-probs, action mask and versions of each turn or observation.
        chunks = [tuple(np.zeros(0, t) for t in (np.int32, np.float32, bool, np.int32))]
        kept: list[np.ndarray | None] = [np.zeros((0, RECORD), np.uint8)]
        turns, experts, length = list[tuple[int, int, float]](), None, 0
        numbers = self._numbers(leaf)
        for number in numbers:
            turn = self._turns[number]
            done, size = turn.completion, len(turn.read) if turns else 0
            if turns:  # an observation has the version of the token before it
                versions = np.full(size, chunks[-1][3][-1], np.int32)
                zeros = np.zeros(size, np.float32)
                chunks.append((turn.read, zeros, np.zeros(size, bool), versions))
                kept.append(np.zeros((size, RECORD), np.uint8))
            acts = np.full(len(done.tokens), number not in trained and not episode.failed)
            chunks.append((done.tokens, done.logprobs, acts, done.versions))
            kept.append(done.kept)
            turns.append((length + size, length + size + len(done.tokens), turn.reward))
            length = turns[-1][1]
            if experts is None or done.experts is None:
                experts = done.experts
            else:
                # Keeps the experts that drew the context; the sampler has computed it again.
                experts = np.concatenate([experts, done.experts[len(experts) :]])
        trained.update(numbers)
        tokens, logprobs, actions, versions = map(np.concatenate, zip(*chunks, strict=True))
        known = [part for part in kept if part is not None]
        return Rollout(
            prompt=self._turns[numbers[0]].read if numbers else self._prompt,
            completion=tokens,
            logprobs=logprobs,
            action_mask=actions,
            version=versions,
            group=0,
            truncated=episode.end in ("max_tokens", "max_turns"),
            episode=episode._replace(turns=self._credited(turns, numbers)),
            experts=experts,
            kept=np.concatenate(known) if len(known) == len(kept) > 1 else None,
        )

    def _credited(
        self, turns: Sequence[tuple[int, int, float]], numbers: Sequence[int]
    ) -> tuple[tuple[int, int, float], ...]:
        """Gives the rewards of all turns to the sequence of the last one, and none to others."""
        if not turns or numbers[-1] != len(self._turns) - 1:
            return tuple((begin, end, 0.0) for begin, end, _ in turns)
        others = (t.reward for i, t in enumerate(self._turns) if i not in numbers)
        begin, end, reward = turns[-1]
        return (*turns[:-1], (begin, end, sum(others, reward)))

    def _numbers(self, last: int) -> list[int]:
        """Lists the turns of the sequence that ends with a turn; none for -1."""
        found = list[int]()
        while last >= 0:
            found.append(last)
            last = self._turns[last].after
        return found[::-1]

    def _sequence(self, last: int | None) -> list[_Turn]:
        assert last is not None
        return [self._turns[number] for number in self._numbers(last)]

    def _length(self, last: int) -> int:
        """Counts the tokens after the prompt in the sequence that ends with a turn."""
        turns = self._sequence(last)
        sizes = sum(len(turn.read) + len(turn.completion.tokens) for turn in turns)
        return sizes - len(turns[0].read)


def _cut(completion: Completion, step: Step) -> Completion:
    """Cuts a turn where its step ends it, as sampling would with the same rule."""
    whole = len(completion.tokens)
    try:
        size = None if step.stop is None else step.stop(completion.tokens)
    except Exception as error:
        raise _invalid(f"stop failed: {error!r}") from error
    if size is None:
        return completion
    if not isinstance(size, (int, np.integer)) or not 0 < size <= whole:
        raise _invalid(f"stop returned {size!r:.200}, expected 1 to {whole} tokens, or None")
    rest = whole - size
    return completion._replace(
        tokens=completion.tokens[:size],
        logprobs=completion.logprobs[:size],
        versions=completion.versions[:size],
        finish_reason="stop",
        experts=None if completion.experts is None else _shortened(completion.experts, rest),
        kept=None if completion.kept is None else completion.kept[:size],
    )


def _shortened(array: np.ndarray, count: int) -> np.ndarray:
    """Returns an array without its last `count` entries."""
    return array[: len(array) - count]


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


def check_prompt(returned: Any, limits: EpisodeLimits) -> Step:
    """Converts the result of `reset` to a step whose observation is a prompt, i32[P]; raises
    EpisodeError if it is invalid."""
    step = returned if isinstance(returned, Step) else Step(returned)
    with _reading("the prompt"):
        prompt = _token_ids(step.observation, limits, what="the prompt")
        _check_turn(step, "reset")
    _check_length(len(prompt), limits, "reset")
    return step._replace(observation=prompt)


def _check_length(size: int, limits: EpisodeLimits, name: str) -> None:
    if not 0 < size <= limits.max_prompt_tokens:
        raise _invalid(
            f"{name} returned a prompt of {size} tokens; return 1 to "
            f"data.max_prompt_tokens = {limits.max_prompt_tokens}"
        )


def check_step(returned: Any, limits: EpisodeLimits) -> Step:
    """Converts the result of `step` to Python's numbers; raises EpisodeError if it is invalid."""
    with _reading("the result of step"):
        if not isinstance(returned, tuple) or not 3 <= len(returned) <= len(Step._fields):
            raise _invalid(f"step returned {returned!r:.200}, expected a Step")
        given = Step(*returned)
        observation, reward, done, metrics, *_ = given
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
        _check_turn(given, "step")
        tokens = () if done else _token_ids(observation, limits, what="the observation")
        return given._replace(observation=tokens, reward=earned, done=bool(done), metrics=values)


def _check_turn(step: Step, name: str) -> None:
    """Raises EpisodeError unless the next turn has a place and a limit that can be kept."""
    for key, least in (("after", -1), ("max_tokens", 1)):
        value = getattr(step, key)
        if value is not None and not (isinstance(value, (int, np.integer)) and value >= least):
            raise _invalid(
                f"{name} returned {key} = {value!r:.200}, expected an integer of at least {least}, "
                "or None"
            )


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
