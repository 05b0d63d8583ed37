"""Runs many episodes at once, each at its own turn."""

import abc
import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core.batch import End, Rollout
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import Environment, EpisodeError, EpisodeLimits
from jaxrl.environments.episodes.episode import EpisodeBuilder, check_prompt, check_step
from jaxrl.environments.episodes.open_file_limit import max_open_episodes, reserve_files
from jaxrl.environments.isolation.calls import Deadline, Worker, run_in_thread, wait_for
from jaxrl.environments.isolation.places import defined_at, describe
from jaxrl.sampling.base import Completion, Sampler, SamplingParams, Turn, TurnCache


class EpisodeResults(NamedTuple):
    """Finished episodes, `group_size` for each prompt, in the order of the prompts."""

    rollouts: list[Rollout]  # without rewards of functions; training ignores those that failed
    first_failure: str | None  # message of an environment, for the log


class EpisodeRunner(NamedTuple):
    """Runs episodes of one environment."""

    make: Callable[[], Environment]  # for one episode
    limits: EpisodeLimits  # of each episode
    scheduler: type["TurnScheduler"]  # decides which turns are sampled together

    def run(
        self,
        examples: Mapping[int, Example],
        *,
        sampler: Sampler,
        params: SamplingParams,
        group_size: int,
    ) -> EpisodeResults:
        """Runs episodes of `examples`, which are given by the number of their group.

        Prompts are processed in chunks if their episodes would exceed the limit on open files. An
        environment that raises, times out or returns an invalid step ends its own episode only. A
        single turn equals a completion of `sampler.sample`. The limits of the runner replace
        `params.max_tokens`. Raises the sampler's exceptions.
        """
        prompts, finished = list(enumerate(examples.items())), list[_Episode]()
        chunk = max(1, max_open_episodes() // group_size)
        for first in range(0, len(prompts), chunk):
            some = prompts[first : first + chunk]
            with reserve_files(len(some) * group_size):
                groups = [
                    [_Episode(self, example, group, (i, j)) for j in range(group_size)]
                    for i, (group, example) in some
                ]
                scheduler = self.scheduler(sampler, params, episodes=len(some) * group_size)
                # In another thread, because a notebook's thread already has an event loop.
                run_in_thread(asyncio.run, _run_groups(groups, scheduler)).result()
                finished += itertools.chain(*groups)
        failures = (e.failure for e in finished if e.failure is not None)
        return EpisodeResults([e.rollout() for e in finished], next(failures, None))


class TurnScheduler(abc.ABC):
    """Collects the turns that episodes request, and samples some of them together."""

    def __init__(self, sampler: Sampler, params: SamplingParams, *, episodes: int) -> None:
        self._sampler, self._params, self._running = sampler, params, episodes
        self._waiting: list[_Request] = []
        self._pool = ThreadPoolExecutor(episodes, thread_name_prefix="turns")

    async def sample(self, turn: Turn, *, number: int) -> Completion:
        """Samples a turn; the first of an episode is number 0. Raises as the sampler."""
        request = _Request(turn, number, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._schedule()
        return await request.completion

    def leave(self) -> None:
        """Records the end of an episode."""
        self._running -= 1
        self._schedule()

    def close(self) -> None:
        """Drops all requests without waiting for the sampler."""
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @abc.abstractmethod
    def _schedule(self) -> None:
        """Sends the requests that are due; called after every change."""

    def _take(self) -> list["_Request"]:
        """Empties the queue, ordered by index because the order of arrival is random."""
        taken = sorted(self._waiting, key=lambda request: request.indices)
        self._waiting.clear()
        return taken

    def _send(self, requests: Sequence["_Request"]) -> None:
        self._pool.submit(self._sample, requests, asyncio.get_running_loop())

    def _sample(self, requests: Sequence["_Request"], loop: asyncio.AbstractEventLoop) -> None:
        pending = {request.indices: request.completion for request in requests}
        seed = turn_seed(self._params.seed, requests[0].number)
        params = dataclasses.replace(self._params, seed=seed)
        try:
            for done in self._sampler.sample_turns([r.turn for r in requests], params):
                future = pending.pop((done.prompt_index, done.sample_index))
                _call_in(loop, future.set_result, done)
        except BaseException as error:  # otherwise the episodes would wait forever
            for future in pending.values():
                _call_in(loop, future.set_exception, error)


class LockstepScheduler(TurnScheduler):
    """Samples the next turns of all running episodes together, which makes runs with the embedded
    sampler reproducible."""

    def _schedule(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            self._send(self._take())


class ContinuousScheduler(TurnScheduler):
    """Samples each turn as soon as it is requested; the first turns of a group are one request."""

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        batches: dict[tuple[int, int], list[_Request]] = {}
        for request in self._take():
            batches.setdefault((request.turn.prompt_index, request.number), []).append(request)
        for batch in batches.values():
            self._send(batch)


def turn_seed(seed: int, number: int) -> int:
    """Returns the seed of an episode's turn; turn 0 has the episode's seed."""
    if number == 0:
        return seed
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 2)


class _Request(NamedTuple):
    turn: Turn
    number: int
    completion: "asyncio.Future[Completion]"

    @property
    def indices(self) -> tuple[int, int]:
        return self.turn.prompt_index, self.turn.sample_index


class _Episode:
    """One episode: its tokens, and its environment in another thread, which may block."""

    def __init__(
        self, runner: EpisodeRunner, example: Example, group: int, index: tuple[int, int]
    ) -> None:
        self.failure: str | None = None
        self._make, self._limits, self._example = runner.make, runner.limits, example
        self._group, self._index = group, index
        self._builder = EpisodeBuilder(example.tokens, index)
        self._worker, self._loop = Worker(), asyncio.Runner()
        self._environment: Environment | None = None
        self._end: End | None = None

    async def begin(self) -> None:
        with self._failures("reset"):
            begin = check_prompt(await self._call(self._reset, name="reset"), self._limits)
            prompt = np.asarray(begin.observation)
            self._builder = EpisodeBuilder(prompt, self._index, begin)

    async def play(self, scheduler: TurnScheduler) -> None:
        number, cache = 0, TurnCache()
        while self._end is None:
            assert self._environment is not None
            turn = self._builder.next_turn(self._limits, cache)
            completion = await scheduler.sample(turn, number=number)
            number += 1
            with self._failures("step"):
                said = self._builder.add_completion(completion)
                step = functools.partial(self._environment.step, said)
                checked = check_step(await self._call(step, name="step"), self._limits)
                self._end = self._builder.add_step(checked, self._limits)
        self._close_environment()
        scheduler.leave()

    def rollout(self) -> Rollout:
        assert self._end is not None
        return self._builder.build(self._end, group=self._group)

    def close(self) -> None:
        self._close_environment()
        self._worker.submit(self._loop.close)
        self._worker.end()

    def _close_environment(self) -> None:
        environment, self._environment = self._environment, None
        if (close := getattr(environment, "close", None)) is not None:
            run_in_thread(close)

    @contextlib.contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        """Ends the episode if its environment's method `name` fails."""
        try:
            yield
        except EpisodeError as error:
            method = getattr(self._environment, name, None)
            place = "" if error.end == "error" else defined_at(method)
            self.failure, self._end = f"{place}{error}", error.end

    def _reset(self) -> Any:
        self._environment = self._make()
        return self._environment.reset(self._example)

    async def _call(self, function: Callable[[], Any], *, name: str) -> Any:
        loop = asyncio.get_running_loop()
        returned: asyncio.Future[Future[Any]] = loop.create_future()

        def work() -> Any:
            result = function()
            if not inspect.isawaitable(result):
                return result
            # The context of this call, not of the loop's first call: it holds the deadline.
            context = contextvars.copy_context()
            return self._loop.run(_awaited(result), context=context)

        deadline = Deadline(self._limits.timeout)
        future = self._worker.submit(work, deadline=deadline)
        future.add_done_callback(lambda done: _call_in(loop, returned.set_result, done))
        try:
            done = await wait_for(returned, deadline)
        except TimeoutError:
            message = f"{name} took longer than {self._limits.timeout:g} s"
            raise EpisodeError("timeout", message) from None
        error = done.exception()
        if error is not None:
            what = describe(error, function=getattr(self._environment, name, self._make))
            raise EpisodeError("error", f"{name} failed: {what}") from error
        return done.result()


async def _run_groups(groups: Sequence[Sequence[_Episode]], scheduler: TurnScheduler) -> None:
    try:
        await asyncio.gather(*(_run_group(episodes, scheduler) for episodes in groups))
    finally:
        scheduler.close()
        for episode in itertools.chain(*groups):
            episode.close()


async def _run_group(episodes: Sequence[_Episode], scheduler: TurnScheduler) -> None:
    # Together, so that the first turns of the group are one request.
    await asyncio.gather(*(episode.begin() for episode in episodes))
    await asyncio.gather(*(episode.play(scheduler) for episode in episodes))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
    """Calls a future's method in its loop; does nothing if either is already done."""

    def call() -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            function(value)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
