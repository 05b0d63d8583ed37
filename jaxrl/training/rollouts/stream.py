"""Asynchronous rollouts: sampled while the learner trains.

Threads sample prompts as `jaxrl.training.rollouts.buffer` admits them. Others score each group as
soon as it is complete and put it into the buffer. `Stream.collect` takes a batch of groups from
there, and waits only if there are too few.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, Self

import numpy as np

from jaxrl.core import Hosts, Rollout
from jaxrl.data import Example
from jaxrl.sampling import SamplingParams
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts import dynamic_sampling
from jaxrl.training.rollouts.buffer import Buffer, Counts, staleness
from jaxrl.training.rollouts.collect import RolloutBatch, collect, prompts_at, request_params
from jaxrl.training.rollouts.generate import Generated, RolloutSource, generate
from jaxrl.training.rollouts.groups import Played
from jaxrl.training.rollouts.score import (
    failure_note,
    reward_metrics,
    score_rollouts,
    scores_by_group,
    with_teacher,
)
from jaxrl.training.timing import Numbers

GRACE = 10.0  # seconds for running rewards to end
PATIENCE = 60.0  # seconds of waiting before the first note; doubles with each

Collect = Callable[..., RolloutBatch | None]
"""(seconds=...) -> the next batch of rollouts to train on; None if a signal ended the wait. It
adds the time of each part to `seconds`."""


@contextmanager
def open_collector(
    source: RolloutSource, *, progress: Progress, interrupt: Interrupt, hosts: Hosts
) -> Iterator[Collect]:
    """Yields the function that collects rollouts, synchronously or while the learner trains.
    Process 0 collects them for all processes."""
    with ExitStack() as stack:
        take: Collect = functools.partial(collect, source, progress=progress)
        if source.config.rollouts.max_staleness and hosts.leads:
            take = stack.enter_context(Stream(source, progress, interrupt=interrupt)).collect

        def broadcast(*, seconds: Numbers) -> RolloutBatch | None:
            rollouts, timed = hosts.on_leader(lambda: (take(seconds=seconds), seconds))
            seconds |= timed
            return rollouts

        yield broadcast


class Stream:
    """The rollouts of a run that samples while it trains."""

    def __init__(self, source: RolloutSource, progress: Progress, *, interrupt: Interrupt) -> None:
        """Resumes from `progress`; sampling starts when the context is entered."""
        c = source.config
        self._source, self._progress, self._interrupt = source, progress, interrupt
        self._buffer = Buffer(
            batch=c.train.train_batch,
            batches=c.train.steps,
            max_staleness=c.rollouts.max_staleness,
            order=c.rollouts.order,
            zero_variance_per_batch=c.train.dynamic_sampling_rounds * c.train.train_batch,
            counts=Counts(**progress.counts),
        )
        self._buffer.restore(progress.pending, progress.running)
        self._step, self._position = progress.step, progress.position
        self._batch = c.train.train_batch
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._failures: dict[int, str] = {}  # by group, the first of its rewards
        self._sampling, self._rewarding = _Clock(), _Clock()
        # A server takes many requests at once; the embedded sampler takes one with many prompts.
        workers = c.sampler.max_requests * max(1, len(c.sampler.url))
        served = c.sampler.name == "vllm"
        self._chunk = 1 if served else c.train.train_batch
        most = (c.rollouts.max_staleness + 1) * c.train.train_batch
        # What is to be done with complete groups; None ends a thread.
        self._complete = SimpleQueue[Callable[[], None] | None]()
        self._sent = set[Future[Any]]()  # groups that the workers of a fleet play
        scoring = min(workers, most) if served else 1
        sampling = 1 if source.workers is not None else scoring
        works = [("rollouts", self._sample_groups)] * sampling
        works += [("rewards", self._score_groups)] * scoring
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"{name}-{i}", daemon=True)
            for i, (name, work) in enumerate(works)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stops the threads and drops requests in flight."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for future in list(self._sent):
            future.cancel()
        for _ in self._threads:
            self._complete.put(None)
        self._source.sampler.close()
        until = time.monotonic() + GRACE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def collect(self, *, seconds: Numbers) -> RolloutBatch | None:
        """Takes a batch to train on at version `progress.step`, and updates `progress` for the next
        checkpoint; returns None if a signal comes first.

        Raises:
          Exception: the error that ended the sampling.
          RuntimeError: if every reward of the batch failed.
        """
        progress, start = self._progress, time.monotonic()
        with self._changed:
            self._step = progress.step
            self._changed.notify_all()
            batch = self._wait()
            seconds["time/wait"] = time.monotonic() - start
            seconds["time/sample"] = self._sampling.lap()
            seconds["time/reward"] = self._rewarding.lap()
            progress.position = self._position
            progress.pending, progress.running = self._buffer.waiting, self._buffer.running
            progress.counts = dataclasses.asdict(self._buffer.counts)
            waiting = {r.group for r in progress.pending}
            failures = self._failures
            self._failures = {g: text for g, text in failures.items() if g in waiting}
        if batch is None:
            return None
        weights = self._source.task.weights
        first = next((failures[r.group] for r in batch if r.group in failures), None)
        if (note := failure_note(batch, weights=weights, first=first)) is not None:
            self._source.note(f"step {progress.step + 1}: {note}")
        numbers = reward_metrics(batch, weights=weights)
        return RolloutBatch(batch, batch, numbers | self._numbers(batch))

    def _wait(self) -> list[Rollout] | None:
        start, patience = time.monotonic(), PATIENCE
        while self._interrupt.signum is None:
            if time.monotonic() > start + patience:
                patience = 2 * patience
                self._source.note(self._waiting_for(time.monotonic() - start))
            batch = self._buffer.take(step=self._step)
            if batch is not None:
                return batch
            if self._error is not None:
                raise self._error
            # Dropped groups make room for new ones. The timeout lets signals through.
            self._changed.notify_all()
            self._changed.wait(timeout=1.0)
        return None

    def _waiting_for(self, seconds: float) -> str:
        counts, waiting = self._buffer.counts, dynamic_sampling.count_groups(self._buffer.waiting)
        return (
            f"step {self._step + 1} has waited {seconds:.0f} s for {self._batch} groups: {waiting} "
            f"are done, {len(self._buffer.running)} are being sampled; so far {counts.sampled} "
            f"sampled, {counts.stale} dropped as stale, {counts.zero_variance} without variance"
        )

    def _numbers(self, batch: list[Rollout]) -> Numbers:
        progress = self._progress
        ages = staleness(batch, step=progress.step)
        return {
            **{f"rollouts/{name}": float(n) for name, n in progress.counts.items()},
            "rollouts/waiting": float(dynamic_sampling.count_groups(progress.pending)),
            "rollouts/running": float(len(progress.running)),
            "staleness": float(np.mean(ages)),
            "staleness/max": float(max(ages)),
        }

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in `collect`
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _sample_groups(self) -> None:
        while (numbers := self._begin()) is not None:
            self._sample(numbers)

    def _score_groups(self) -> None:
        while (work := self._complete.get()) is not None and not self._closed:
            work()

    def _begin(self) -> list[int] | None:
        with self._changed:
            while not self._closed and self._error is None:
                numbers = self._buffer.begin(
                    next_number=self._position, step=self._step, most=self._chunk
                )
                if numbers:
                    self._position = max(self._position, numbers[-1] + 1)
                    self._sampling.start(len(numbers))
                    return numbers
                self._changed.wait()
        return None

    def _sample(self, numbers: list[int]) -> None:
        source, size = self._source, self._source.config.train.group_size
        examples = prompts_at(source, numbers)
        params = request_params(source, step=self._step, request=numbers[0])
        if source.workers is not None:
            for number in numbers:
                self._send(number, examples[number], params)
            return
        groups: dict[int, list[Generated]] = {number: [] for number in numbers}
        for one in generate(source, examples, params=params, group_size=size):
            number = one.rollout.group
            groups[number].append(one)
            if len(groups[number]) == size:
                with self._changed:
                    self._sampling.stop()
                    self._rewarding.start()
                group = sorted(groups.pop(number), key=lambda one: one.index)
                rollouts = [rollout for _, rollout in group]
                self._complete.put(functools.partial(self._score, rollouts, examples[number]))
        if groups:  # the learner would wait for them forever
            raise RuntimeError(f"the sampler ended without all completions of prompts {[*groups]}")

    def _send(self, number: int, example: Example, params: SamplingParams) -> None:
        """Has a group played by the workers of a fleet."""
        source, size = self._source, self._source.config.train.group_size
        assert source.workers is not None
        by_group = scores_by_group(source)
        future = source.workers.submit(
            number, example, index=0, params=params, size=size, scored=by_group
        )

        def receive() -> None:
            played = source.workers.played(
                future.result(), number=number, example=example, size=size
            )
            if by_group:
                self._finish(played)
            else:
                self._score(played.rollouts, example)

        def done(_: object) -> None:
            if not future.cancelled():
                with self._changed:
                    self._sent.discard(future)
                    self._sampling.stop()
                    self._rewarding.start()
                self._complete.put(receive)

        self._sent.add(future)
        future.add_done_callback(done)

    def _score(self, ordered: Sequence[Rollout], example: Example) -> None:
        number, failures = ordered[0].group, list[str]()
        noting = self._source._replace(note=failures.append)
        self._finish(Played(score_rollouts(noting, ordered, examples={number: example}), failures))

    def _finish(self, scored: Played) -> None:
        rollouts, failures = scored
        number, rollouts = rollouts[0].group, with_teacher(self._source, rollouts)
        with self._changed:
            self._rewarding.stop()
            if failures:
                self._failures[number] = failures[0]
            self._buffer.finish(number, rollouts)
            self._changed.notify_all()


class _Clock:
    """Measures the seconds during which at least one task is running."""

    def __init__(self) -> None:
        self._running, self._since, self._total = 0, 0.0, 0.0

    def start(self, count: int = 1) -> None:
        if not self._running:
            self._since = time.monotonic()
        self._running += count

    def stop(self) -> None:
        self._running -= 1
        if not self._running:
            self._total += time.monotonic() - self._since

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        now = time.monotonic()
        total = self._total + (now - self._since if self._running else 0.0)
        self._since, self._total = now, 0.0
        return total
