"""The loop of supervised runs: fine-tuning, a reward model, DPO.

A `Task` holds the differences between them: the batches, the step, and the held-out measurements.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.builders.model import attention_note
from jaxrl.builders.optimizer import state_shardings
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.batch import Minibatch
from jaxrl.core.hosts import Hosts
from jaxrl.core.metrics import Metrics, to_floats
from jaxrl.data import prompts
from jaxrl.learner.policy import LearnerState
from jaxrl.learner.update import applied_steps
from jaxrl.models import huggingface
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.monitoring.tracking.tracking import Tracker, open_tracker
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.schedule import is_due
from jaxrl.training.storage.checkpoint import Checkpoints
from jaxrl.training.storage.run_directory import check_config, lock
from sharding.partition import Layout
from sharding.transfer import fetch

_LOG_EVERY = 10  # steps between two readings of the loss, each of which waits for the device

Numbers = dict[str, float]
Update = Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def unchanged(minibatch: Minibatch) -> Minibatch:
    """Returns the minibatch: the `Task.prepare` of a loss that needs no further scores."""
    return minibatch


def no_measurement(params: Params) -> Numbers:
    """Returns no numbers: the `Task.measure` of a run without held-out data."""
    del params
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A supervised objective with its data.

    Attributes:
      title: of the live display.
      model: the trained model; its specs say how parameters lie on devices.
      params: initial parameters.
      init: params -> state before the first step.
      step: (state, minibatch) -> (state, metrics), not compiled.
      learning_rate: optimizer step -> learning rate.
      batch: optimizer step -> its minibatch. It depends on nothing else, so that a run can resume.
      prepare: adds scores that the step needs and that do not change.
      measure: params -> numbers on held-out data; "accuracy" among them selects the best
        checkpoint.
      notes: lines shown at the start.
    """

    title: str
    model: Model
    params: Params
    init: Callable[[Params], LearnerState]
    step: Update
    learning_rate: Any
    batch: Callable[[int], Minibatch]
    prepare: Callable[[Minibatch], Minibatch] = unchanged
    measure: Callable[[Params], Numbers] = no_measurement
    notes: Sequence[str] = ()


class Result(NamedTuple):
    """The outcome of a supervised run.

    Attributes:
      step: optimizer steps taken.
      signum: the signal that ended it early, or None.
      first: held-out measurements before the first step.
      last: the metrics of the last logged step, and the last held-out measurements.
      model: directory of the trained model; None if the run ended early.
    """

    step: int
    signum: int | None
    first: Numbers
    last: Numbers
    model: Path | None


@dataclasses.dataclass
class _Position:
    """The host's state of a supervised run: steps taken, and the `first` and `last` of `Result`."""

    step: int = 0
    first: Numbers = dataclasses.field(default_factory=dict)
    last: Numbers = dataclasses.field(default_factory=dict)


def fit(config: SupervisedConfig, task: Task, *, layout: Layout, eval_every: int = 0) -> Result:
    """Trains for `config.train.steps` steps, or until a signal, and saves the model.

    A run that was stopped or killed resumes from its last checkpoint when it is called again with
    the same config, and computes the same parameters bit for bit.

    Raises:
      ResumeError: if the run directory holds a run with another config, or another program trains
        in it.
      CheckpointError: if a checkpoint cannot be written or read.
      ValueError: if the kernel of `train.attention` cannot be used; the message gives the reason.
    """
    with lock(Path(config.run_dir), Hosts()):
        return _fit(config, task, layout=layout, eval_every=eval_every)


def _fit(config: SupervisedConfig, task: Task, *, layout: Layout, eval_every: int) -> Result:
    directory = Path(config.run_dir)
    attention = attention_note(
        config.train.attention,
        config=task.model.config,
        layout=layout,
        policy=config.policy,
        length=config.train.row_length,
    )
    check_config(directory, config)
    state, update = compile_step(config, task, layout=layout)
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
    )
    try:
        state, position = restored(checkpoints, state)
        with (
            Interrupt() as interrupt,
            open_tracker(
                directory,
                start_step=position.step,
                total_steps=config.train.steps,
                title=task.title,
            ) as tracker,
        ):
            for note in (attention, *task.notes):
                tracker.note(note)
            log = _Log(task, tracker)
            if position.step == 0:
                position.first = log.held_out(state, position)
            stopping = position.step == config.train.steps
            while not stopping:
                minibatch = task.batch(position.step)
                state, metrics = update(state, task.prepare(minibatch))
                position.step += 1
                last = position.step == config.train.steps
                stopping = last or interrupt.signum is not None
                log.count(minibatch)
                if last or is_due(_LOG_EVERY, position.step):
                    log.training(state, metrics, position=position)
                measured: Numbers = {}
                if last or is_due(eval_every, position.step):
                    measured = log.held_out(state, position)
                if stopping or is_due(config.checkpoint.every, position.step):
                    save(checkpoints, state, position=position, metric=measured.get("accuracy"))
    finally:
        checkpoints.close()
    if position.step < config.train.steps:
        return Result(position.step, interrupt.signum, position.first, position.last, None)
    model = export(config, task.model, params=state.params)
    return Result(position.step, None, position.first, position.last, model)


def compile_step(
    config: SupervisedConfig, task: Task, *, layout: Layout
) -> tuple[LearnerState, Update]:
    """Returns the state before the first step and the jitted step, which donates its state."""
    shardings = state_shardings(
        config.optimizer, task.init, task.params, layout=layout, specs=task.model.specs
    )
    state = jax.jit(task.init, out_shardings=shardings)(task.params)
    return state, jax.jit(task.step, donate_argnums=0, out_shardings=(shardings, None))


def restored(checkpoints: Checkpoints, state: LearnerState) -> tuple[LearnerState, _Position]:
    """Reads the last checkpoint; without one, returns `state` at step 0."""
    if (step := checkpoints.latest_step()) is None:
        return state, _Position()
    found = checkpoints.restore(step, state)
    return found.state, _Position(step, **found.host)


def save(
    checkpoints: Checkpoints, state: LearnerState, *, position: _Position, metric: float | None
) -> None:
    """Saves a checkpoint."""
    host = {"first": position.first, "last": position.last}
    checkpoints.save(position.step, state, host=host, metric=metric)


def export(config: SupervisedConfig, model: Model, *, params: Params) -> Path:
    """Writes the trained model as a Hugging Face checkpoint; returns its directory."""
    directory = Path(config.run_dir) / "model"
    dtype = config.policy.params
    huggingface.save(directory, params, model.config, dtype=dtype, source_dir=config.model.path)
    return directory


class _Log:
    """Writes the metrics of a run and measures its throughput."""

    def __init__(self, task: Task, tracker: Tracker) -> None:
        self._task, self._tracker = task, tracker
        self._since, self._tokens = time.perf_counter(), 0

    def count(self, minibatch: Minibatch) -> None:
        """Counts the tokens of a step."""
        self._tokens += int(np.count_nonzero(fetch(minibatch.batch.segments)))

    def training(self, state: LearnerState, metrics: Metrics, *, position: _Position) -> None:
        """Logs the metrics of a step, which it waits for, with the throughput since the last."""
        last, now = position.last | to_floats(metrics), time.perf_counter()
        last["tokens_per_second"] = self._tokens / (now - self._since)
        last["learning_rate"] = last_learning_rate(self._task, state)
        shown = {name: x for name, x in last.items() if not name.startswith("eval/")}
        self._tracker.log(position.step, shown)
        self._since, self._tokens, position.last = now, 0, last

    def held_out(self, state: LearnerState, position: _Position) -> Numbers:
        """Measures the held-out data and logs the result; empty without such data."""
        measured = self._task.measure(state.params)
        named = {f"eval/{name}": value for name, value in measured.items()}
        if named:
            self._tracker.log(position.step, named)
        if position.step:
            position.last |= named
        return measured


def last_learning_rate(task: Task, state: LearnerState) -> float:
    """Returns the learning rate of the last applied step."""
    return float(np.asarray(task.learning_rate(max(applied_steps(state) - 1, 0))))


def batch_indices(size: int, *, step: int, config: SupervisedConfig) -> list[int]:
    """Returns the indices, out of `size` texts or pairs, that an optimizer step learns from."""
    count = config.train.batch_size
    indices = prompts.next_indices(size, position=step * count, count=count, seed=config.seed)
    return [int(i) for i in indices]


def too_long_note(key: str, count: int, *, config: SupervisedConfig) -> list[str]:
    """Returns a line about texts or pairs that did not fit into a row; empty if all did."""
    return [
        f"{key}: dropped {count} rows with more than train.row_length = {config.train.row_length} "
        "tokens"
    ] * (count > 0)
