"""Many episodes at once, each at its own turn."""

import abc
import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import BrokenError, Environment, Limits, MakeEnvironment
from jaxrl.environments.episodes.episode import Draft, check_prompt, check_step
from jaxrl.environments.episodes.open_file_limit import episodes_at_once, room
from jaxrl.environments.isolation.calls import Clock, Worker, within
from jaxrl.sampling.base import Completion, Sampler, SamplingParams, Turn


class Arena(NamedTuple):
    """Where episodes take place.

    Attributes:
      make: () -> the environment of one episode.
      limits: of each episode.
      desk: how episodes take turns.
    """

    make: MakeEnvironment
    limits: Limits
    desk: type["Desk"]


class Played(NamedTuple):
    """Episodes, `group_size` for each prompt, in the order of the prompts.

    Attributes:
      rollouts: without the rewards of reward functions; nothing is learnt from a broken one.
      first_failure: what the first broken environment said, for the log; None without one.
    """

    rollouts: list[Rollout]
    first_failure: str | None


class Desk(abc.ABC):
    """Where episodes ask for their next turn."""

    def __init__(self, sampler: Sampler, params: SamplingParams, *, episodes: int) -> None:
        """A desk for so many episodes; `params.max_tokens` does not count."""
        self._sampler, self._params, self._live = sampler, params, episodes
        self._waiting: list[_Asked] = []
        self._pool = ThreadPoolExecutor(episodes, thread_name_prefix="turns")

    async def ask(self, turn: Turn, *, number: int) -> Completion:
        """The policy's turn, the first of an episode being number 0; raises as the sampler."""
        asked = _Asked(turn, number, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._notice()
        return await asked.answer

    def leave(self) -> None:
        """An episode is over."""
        self._live -= 1
        self._notice()

    def close(self) -> None:
        """Forgets those that wait, and does not wait for the sampler."""
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @abc.abstractmethod
    def _notice(self) -> None:
        """Looks whether anything is to be sampled now."""

    def _take(self) -> list["_Asked"]:
        """Those that wait; in what order they came is left to chance and must not matter."""
        taken = sorted(self._waiting, key=lambda a: (a.turn.prompt_index, a.turn.sample_index))
        self._waiting.clear()
        return taken

    def _send(self, asked: Sequence["_Asked"]) -> None:
        self._pool.submit(self._draw, asked, asyncio.get_running_loop())

    def _draw(self, asked: Sequence["_Asked"], loop: asyncio.AbstractEventLoop) -> None:
        seats = {(a.turn.prompt_index, a.turn.sample_index): a.answer for a in asked}
        params = dataclasses.replace(
            self._params, seed=turn_seed(self._params.seed, asked[0].number)
        )
        try:
            for done in self._sampler.sample_turns([a.turn for a in asked], params):
                _tell(loop, seats.pop((done.prompt_index, done.sample_index)).set_result, done)
        except BaseException as error:  # whoever waits must not wait for ever
            for answer in seats.values():
                _tell(loop, functools.partial(_fail, answer), error)


class RoundsDesk(Desk):
    """All episodes that go on take their turns together, so that what is drawn together does not
    depend on who was faster: for the embedded sampler, whose runs are reproducible."""

    def _notice(self) -> None:
        if self._waiting and len(self._waiting) == self._live:
            self._send(self._take())


class RequestsDesk(Desk):
    """Each episode goes on as soon as it can: for servers. A group that begins is one request."""

    def _notice(self) -> None:
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        requests: dict[tuple[int, int], list[_Asked]] = {}
        for asked in self._take():
            requests.setdefault((asked.turn.prompt_index, asked.number), []).append(asked)
        for together in requests.values():
            self._send(together)


def play(
    arena: Arena,
    examples: Mapping[int, Example],
    *,
    sampler: Sampler,
    params: SamplingParams,
    group_size: int,
) -> Played:
    """Plays episodes to their ends.

    Where there are more than the process may keep open, prompts take turns. An environment that
    raises, takes longer than `limits.seconds` or returns nonsense ends its own
    episode and no other. An episode of a single turn is what `sampler.sample` draws.

    Args:
      arena: where.
      examples: by the number of their group.
      sampler: draws the policy's turns.
      params: how; instead of `max_tokens` the limits of the arena count.
      group_size: episodes for each example.

    Raises:
      Exception: what the sampler raises.
    """
    numbers, played = list(examples), list[Played]()
    groups = max(1, episodes_at_once() // group_size)
    worker = Worker()
    try:
        for first in range(0, len(numbers), groups):
            some = {number: examples[number] for number in numbers[first : first + groups]}
            episodes = len(some) * group_size
            with room(episodes):
                desk = arena.desk(sampler, params, episodes=episodes)
                game = _play(arena, some, desk=desk, first=first, group_size=group_size)
                # In a thread of its own: a notebook's has an event loop already.
                played.append(worker.submit(asyncio.run, game).result())
    finally:
        worker.end()
    failures = (one.first_failure for one in played if one.first_failure is not None)
    return Played([r for one in played for r in one.rollouts], next(failures, None))


def turn_seed(seed: int, number: int) -> int:
    """The seed of a turn; that of the first is the episode's own."""
    if number == 0:
        return seed
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 2)


class _Asked(NamedTuple):
    turn: Turn
    number: int
    answer: "asyncio.Future[Completion]"


class _Game(NamedTuple):
    """One episode: the thread of its environment, what it begins with, and its place."""

    calls: "_Calls"
    example: Example
    group: int
    prompt_index: int
    sample_index: int


async def _play(
    arena: Arena, examples: Mapping[int, Example], *, desk: Desk, first: int, group_size: int
) -> Played:
    """Plays the episodes of some prompts, of which the first has this index."""
    limits = arena.limits
    games = [
        _Game(_Calls(arena.make, seconds=limits.seconds), example, number, i, j)
        for i, (number, example) in enumerate(examples.items(), start=first)
        for j in range(group_size)
    ]
    failures: list[str] = []
    starts = [range(i, i + group_size) for i in range(0, len(games), group_size)]
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = {
                i: asyncio.gather(*(_begin(games[k], limits, failures) for k in members))
                for i, members in enumerate(starts, start=first)
            }
            made = [
                tasks.create_task(_episode(game, begun[game.prompt_index], desk, limits, failures))
                for game in games
            ]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        desk.close()
        for game in games:
            game.calls.end()
    return Played([task.result() for task in made], failures[0] if failures else None)


async def _begin(game: _Game, limits: Limits, failures: list[str]) -> Draft | Rollout:
    """An episode, or what is left of one whose environment fails at once."""
    prompt = game.example.tokens
    seat = {"prompt_index": game.prompt_index, "sample_index": game.sample_index}
    try:
        prompt = check_prompt(await game.calls.reset(game.example), limits)
    except BrokenError as error:
        failures.append(str(error))
        return Draft(prompt, **seat).rollout(error.end, group=game.group)
    return Draft(prompt, **seat)


async def _episode(
    game: _Game,
    begun: "asyncio.Future[list[Draft | Rollout]]",
    desk: Desk,
    limits: Limits,
    failures: list[str],
) -> Rollout:
    # A group begins together: its first turns are one request.
    draft = (await asyncio.shield(begun))[game.sample_index]
    if isinstance(draft, Rollout):
        desk.leave()
        return draft
    number, end = 0, None
    while end is None:
        completion = await desk.ask(draft.turn(limits), number=number)
        draft.take(completion)
        number += 1
        try:
            step = check_step(await game.calls.step(completion.tokens), limits)
            end = draft.see(step, limits)
        except BrokenError as error:
            failures.append(str(error))
            end = error.end
    desk.leave()
    return draft.rollout(end, group=game.group)


class _Calls:
    """An environment in a thread of its own: it may block, and it may never return."""

    def __init__(self, make: MakeEnvironment, *, seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._worker, self._runner = Worker(), asyncio.Runner()
        self._environment: Environment | None = None

    async def reset(self, example: Example) -> Any:
        def begin() -> Any:
            self._environment = self._make()
            return self._environment.reset(example)

        return await self._call(begin, name="reset")

    async def step(self, completion: np.ndarray) -> Any:
        environment = self._environment
        assert environment is not None
        return await self._call(lambda: environment.step(completion), name="step")

    def end(self) -> None:
        self._worker.submit(self._runner.close)
        self._worker.end()

    async def _call(self, function: Callable[[], Any], *, name: str) -> Any:
        loop = asyncio.get_running_loop()
        returned: asyncio.Future[Future[Any]] = loop.create_future()

        def work() -> Any:
            found = function()
            if not inspect.isawaitable(found):
                return found
            # Of this call, not of the first that the runner has seen: the clock is in it.
            context = contextvars.copy_context()
            return self._runner.run(_awaited(found), context=context)

        clock = Clock(self._seconds)
        future = self._worker.submit(work, clock=clock)
        future.add_done_callback(lambda done: _tell(loop, returned.set_result, done))
        try:
            done = await within(returned, clock)
        except TimeoutError:
            raise BrokenError("late", f"{name} took longer than {self._seconds:g} s") from None
        error = done.exception()
        if error is not None:
            raise BrokenError("raised", f"{name} raised {error!r}") from error
        return done.result()


def _fail(answer: "asyncio.Future[Completion]", error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # seen, even if one other of them has ended everything


async def _awaited(found: Any) -> Any:
    return await found


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
    """Calls a future's function in its loop; nobody waits any more where it is done or closed."""

    def call() -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            function(value)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
