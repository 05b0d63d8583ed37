"""Answers that are sampled while the learner trains.

Threads take prompts as `jaxrl.training.rollouts.buffer` admits them, draw each group, reward it and
put it into the buffer. The learner's `collect` takes a batch of groups from there and waits only if
there are too few.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.core.hosts import Hosts
from jaxrl.data.prompts import Example
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.rollouts import dynamic_sampling
from jaxrl.training.rollouts.answers import (
    Answers,
    Numbers,
    collect,
    prompts_from,
    reward,
    reward_metrics,
    seed,
)
from jaxrl.training.rollouts.buffer import Buffer, Counts, staleness
from jaxrl.training.rollouts.draw import Drawn, draw
from jaxrl.training.run import Progress, Run

LEAVING = 10.0  # seconds in which rewards may come to an end


class Collect(Protocol):
    """The next batch of answers to learn from."""

    def __call__(self, *, seconds: Numbers) -> Answers | None:
        """Adds to `seconds` what it took; None if a signal came while it waited."""
        ...


@contextmanager
def open_answers(run: Run, progress: Progress, interrupt: Interrupt) -> Iterator[Collect]:
    """How a run comes to its answers: in turn with learning, or while the learner trains."""
    if run.config.rollouts.max_staleness == 0 or not run.hosts.leads:
        yield _shared(run.hosts, functools.partial(collect, run, progress))
    else:
        with Stream(run, progress, interrupt) as stream:
            yield _shared(run.hosts, stream.collect)


def _shared(hosts: Hosts, collect: Collect) -> Collect:
    """What process 0 collects, on all processes."""

    def shared(*, seconds: Numbers) -> Answers | None:
        answers, taken = hosts.on_leader(lambda: (collect(seconds=seconds), seconds))
        seconds |= taken
        return answers

    return shared


class Stream:
    """The answers of a run whose sampler does not wait for the learner."""

    def __init__(self, run: Run, progress: Progress, interrupt: Interrupt) -> None:
        """Goes on from `progress`; nothing is sampled before the context is entered."""
        c = run.config
        self._run, self._progress, self._interrupt = run, progress, interrupt
        self._buffer = Buffer(
            batch=c.train.train_batch,
            batches=c.train.steps,
            max_staleness=c.rollouts.max_staleness,
            order=c.rollouts.order,
            max_seconds=c.rollouts.max_seconds or float("inf"),
            flat_per_batch=c.train.refill_rounds * c.train.train_batch,
            counts=Counts(**progress.counts),
        )
        self._buffer.restore(progress.pending, progress.running, now=time.monotonic())
        self._step, self._position = progress.step, progress.position
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._sampling, self._rewarding = _Clock(), _Clock()
        # A server takes many requests at a time. The embedded sampler decodes many at once, of one.
        workers = c.sampler.max_requests * max(1, len(c.sampler.url))
        served = c.sampler.name == "vllm"
        self._chunk = 1 if served else c.train.train_batch
        most = (c.rollouts.max_staleness + 1) * c.train.train_batch
        self._threads = [
            threading.Thread(target=self._work, name=f"rollouts-{i}", daemon=True)
            for i in range(min(workers, most) if served else 1)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drops what is in flight."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._run.sampler.close()
        until = time.monotonic() + LEAVING
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def collect(self, *, seconds: Numbers) -> Answers | None:
        """A batch to learn from at version `progress.step`, and what a checkpoint must hold to go
        on behind it, in `progress`; None if a signal comes first.

        Raises:
          Exception: what ended the sampling.
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
        if batch is None:
            return None
        numbers = reward_metrics(self._run, batch) | self._numbers(batch)
        return Answers(batch, batch, numbers)

    def _wait(self) -> list[Rollout] | None:
        while self._interrupt.signum is None:
            batch = self._buffer.take(step=self._step, now=time.monotonic())
            if batch is not None:
                return batch
            if self._error is not None:
                raise self._error
            # What was dropped makes room. A wait that ends lets signals through, too.
            self._changed.notify_all()
            self._changed.wait(timeout=1.0)
        return None

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

    def _work(self) -> None:
        """What each thread does until the stream is closed or something fails."""
        try:
            while (numbers := self._begin()) is not None:
                self._answer(numbers)
        except BaseException as error:  # a thread must not end unseen
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

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

    def _answer(self, numbers: list[int]) -> None:
        run, size = self._run, self._run.config.train.group_size
        examples = prompts_from(run, numbers)
        params = dataclasses.replace(
            run.sampling, seed=seed(run.config.seed, self._step, numbers[0])
        )
        groups: dict[int, list[Drawn]] = {number: [] for number in numbers}
        for drawn in draw(run, examples, params, group_size=size):
            number = drawn.rollout.group
            groups[number].append(drawn)
            if len(groups[number]) == size:
                self._finish(groups.pop(number), examples[number])

    def _finish(self, answers: list[Drawn], example: Example) -> None:
        ordered = [rollout for _, rollout in sorted(answers, key=lambda answer: answer.place)]
        number = ordered[0].group
        with self._changed:
            self._sampling.stop()
            self._rewarding.start()
        rollouts = reward(self._run, ordered, {number: example})
        with self._changed:
            self._rewarding.stop()
            self._buffer.finish(number, rollouts, now=time.monotonic())
            self._changed.notify_all()


class _Clock:
    """Seconds in which anything was being done."""

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
        """Seconds since the last call."""
        now = time.monotonic()
        total = self._total + (now - self._since if self._running else 0.0)
        self._since, self._total = now, 0.0
        return total
