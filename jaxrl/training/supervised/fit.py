"""The loop of supervised runs: fine-tuning, a reward model, DPO.

A `Task` holds the differences between them: the batches, the step, and the held-out measurements.
All processes of a run call the same functions, but only process 0 reads the data.
"""

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.builders.model import attention_note
from jaxrl.builders.optimizer import state_shardings
from jaxrl.builders.supervised import Setup
from jaxrl.config.bucket import local_directory
from jaxrl.config.data import HeldOutConfig
from jaxrl.config.preference import DPOConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core import (
    Hosts,
    Metrics,
    Minibatch,
    Precision,
    Rollout,
    flags_note,
    jit,
    short_name,
    to_floats,
)
from jaxrl.data import Rendering, Tokenizer, end_note, marked_text, next_indices, one_line
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import (
    Checkpoints,
    Learner,
    LearnerState,
    Ranker,
    applied_steps,
    checkpoint_view,
    from_checkpoint,
)
from jaxrl.models import Params
from jaxrl.sharding import fetch
from jaxrl.tracking.tracker import NullTracker, Tracker, gap, incomplete_logs
from jaxrl.training.absorbed import absorbed_note
from jaxrl.training.export import model_dtype, write_model
from jaxrl.training.first_lines import first_lines
from jaxrl.training.first_step import first_step
from jaxrl.training.fork import Fork, find_fork
from jaxrl.training.inputs import (
    HELD_OUT,
    OTHER_HELD_OUT,
    TRAINING,
    Input,
    compare_inputs,
    held_out_digest,
    held_out_input,
    model_inputs,
    rows_input,
    write_inputs,
)
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.run_directory import check_config, compare_config, lock, open_run_tracker
from jaxrl.training.timing import Numbers, is_due

_LOG_EVERY = 10  # steps; each reading of the loss waits for the device

Update = Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A supervised objective with its data."""

    title: str  # of the live display
    setup: Setup  # the model, and the optimizer of its learner
    learner: Learner | Ranker  # not compiled
    rows: Sequence[Any]  # the data; empty on processes other than 0
    pack: Callable[[Sequence[Any]], Minibatch]  # a batch of rows -> the minibatch
    # (params, minibatch) -> the minibatch with scores that the step needs.
    prepare: Callable[[Params, Minibatch], Minibatch] = lambda params, minibatch: minibatch
    # params -> numbers on held-out data; "accuracy" among them selects the best checkpoint.
    measure: Callable[[Params], Numbers] = lambda params: {}
    eval_every: int = 0  # steps between two measurements, as `eval.every`
    lengths: Sequence[int] = ()  # tokens of each row
    notes: Sequence[str] = ()  # lines shown at the start
    details: Sequence[str] = ()  # further lines, for `--verbose`
    held_out: Sequence[Any] = ()  # the held-out data of `measure`
    fork: Fork | None = None  # the checkpoint of another run that it starts from


@dataclasses.dataclass
class FitResult:
    """The outcome of a supervised run."""

    step: int = 0  # optimizer steps taken
    position: int = 0  # rows taken from the data so far
    # Held-out measurements before the first step.
    first: Numbers = dataclasses.field(default_factory=dict)
    held_out: str | None = None  # digest of their data; None if it was not kept
    # Metrics of the last logged step, and the last held-out measurements.
    last: Numbers = dataclasses.field(default_factory=dict)
    signum: int | None = None  # the signal that ended it early, or None
    model: Path | None = None  # directory of the trained model; None if the run ended early
    written: str = ""  # dtype of the model's files, and the trained dtype if it is another


def check_resumable(config: SupervisedConfig, *, fork: str | None) -> Fork | None:
    """Raises ResumeError on every process if the run directory holds a run with another config;
    returns and raises as `find_fork`."""
    hosts = Hosts()
    hosts.on_leader(lambda: compare_config(local_directory(config.run_dir), config))
    return hosts.on_leader(lambda: find_fork(fork, config))


def fit(config: SupervisedConfig, task: Task) -> FitResult:
    """Trains for `config.train.steps` steps, or until a signal; writes the model after the last.

    A run that was stopped or killed resumes from its last checkpoint when it is called again with
    the same config, and computes the same parameters bit for bit.

    Raises:
      ResumeError: if the run directory holds another config or other inputs, or another program
        trains in it.
      CheckpointError: if a checkpoint cannot be written or read.
      ValueError: if the kernel of `train.attention` cannot be used; the message gives the reason.
    """
    directory, setup, hosts = local_directory(config.run_dir), task.setup, task.setup.hosts
    with lock(directory, hosts), hosts.reporting():
        attention = attention_note(config, setup.model, layout=setup.layout)
        inputs = hosts.on_leader(lambda: compare_inputs(directory, _inputs(config, task)))
        change = hosts.on_leader(lambda: check_config(directory, config))
        hosts.on_leader(lambda: write_inputs(directory, inputs))
        if task.fork is not None:
            task = dataclasses.replace(task, fork=task.fork._replace(here=inputs))
        repaired = hosts.on_leader(lambda: incomplete_logs(directory))
        kept = config.checkpoint
        checkpoints = Checkpoints(
            directory / "checkpoints", keep=kept.keep, keep_best=kept.keep_best
        )
        with closing(checkpoints):
            first = first_lines(
                config,
                setup.model,
                specs=setup.specs,
                devices=attention,
                lengths=task.lengths,
                held_out=len(task.held_out),
            )
            notes = (*repaired, *first, change, *task.notes)
            data = held_out_digest(inputs)
            result, params = _train(
                config, task, checkpoints=checkpoints, notes=notes, held_out=data
            )
        if result.step == config.train.steps:
            result.model = write_model(
                config,
                params,
                source=setup.checkpoint,
                model=setup.model,
                specs=setup.specs,
                hosts=hosts,
            )
            result.written = _written(config, setup.checkpoint)
        return result


def _written(config: SupervisedConfig, source: Checkpoint) -> str:
    """Describes the dtype of a run's model, and the way to the trained one if it is another."""
    written, trained = model_dtype(config, source), config.precision.params
    if config.lora.rank or written == trained:
        return short_name(written)
    again = f"jaxrl export {shlex.quote(config.run_dir)} OUT --dtype {short_name(trained)}"
    return f"{short_name(written)}, as the model it started from; as trained: {again}"


def _inputs(config: SupervisedConfig, task: Task) -> Iterator[Input]:
    """Yields what the run reads at each start."""
    yield rows_input(TRAINING, f"data.path = {config.data.path!r}", task.rows)
    if isinstance(config.data, HeldOutConfig) and config.data.eval_path is not None:
        yield held_out_input(config.data, task.held_out)
    reference = isinstance(config, DPOConfig)
    yield from model_inputs(config, task.setup.checkpoint, reference=reference)


def restore(
    config: SupervisedConfig, task: Task, state: LearnerState, *, checkpoints: Checkpoints
) -> tuple[LearnerState, FitResult]:
    """Reads the last checkpoint; without one, returns `state` and no result. Of a run that begins
    as a fork, it reads the checkpoint of the other run, and saves it here."""
    fork, like = task.fork, checkpoint_view(state)
    if (step := checkpoints.latest_step()) is not None:
        found = checkpoints.restore(step, like)
    elif fork is not None:
        found, step = fork.read(like), fork.step
    else:
        return state, FitResult()
    state = from_checkpoint(found.state, like=state)
    result = FitResult(step, step * config.train.batch_size)
    result = dataclasses.replace(result, **found.host)  # those of older versions lack the position
    if fork is not None:
        if fork.has_other(TRAINING):
            result.position = 0
        if fork.has_other(HELD_OUT):
            result.first, result.held_out = {}, None
        _save(checkpoints, state, result)
        checkpoints.wait()
    return state, result


def _save(
    checkpoints: Checkpoints, state: LearnerState, result: FitResult, *, metric: float | None = None
) -> None:
    names = ("first", "last", "position", "held_out")
    host = {name: getattr(result, name) for name in names}
    checkpoints.save(result.step, checkpoint_view(state), host=host, metric=metric)


def _train(
    config: SupervisedConfig,
    task: Task,
    *,
    checkpoints: Checkpoints,
    notes: Sequence[str | None],
    held_out: str,
) -> tuple[FitResult, Params]:
    (state, update), hosts, fork = compile_step(config, task), task.setup.hosts, task.fork
    state, result = restore(config, task, state, checkpoints=checkpoints)
    if result.held_out not in (None, "", held_out):
        result.first, notes = {}, (*notes, OTHER_HELD_OUT)
    result.held_out = held_out
    opened = open_run_tracker(
        config,
        step=result.step,
        hosts=hosts,
        layout=task.setup.layout,
        title=task.title,
        origin=None if fork is None else fork.origin,
    )
    with Interrupt() as interrupt, opened as tracker:
        missing = None if fork is None else fork.note
        if hosts.leads and fork is None:
            missing = gap(tracker.history, step=result.step, every=_LOG_EVERY)
        for note in filter(None, (*notes, missing)):
            tracker.note(note)
        flags = flags_note(task.setup.layout.mesh.devices.flat[0])
        for detail in filter(None, (*task.details, flags)):
            tracker.detail(detail)
        log = _Log(task, tracker, state=state, result=result, precision=config.precision)
        if result.step == 0:
            result.first = log.held_out(state)
        stopping = result.step == config.train.steps
        shapes = (state, config.row_length, config.microbatch_rows)
        with first_step(shapes, tracker=tracker, done=stopping) as first_step_done:
            while not stopping:
                minibatch = next_batch(config, task, position=result.position)
                state, metrics = update(state, task.prepare(state.params, minibatch))
                result.step += 1
                result.position += config.train.batch_size
                first_step_done()
                last = result.step == config.train.steps
                signum = hosts.largest(interrupt.signum or 0)
                stopping = last or signum > 0
                log.count(minibatch)
                if last or is_due(_LOG_EVERY, result.step):
                    log.training(state, metrics)
                measured: Numbers = {}
                if last or is_due(task.eval_every, result.step):
                    measured = log.held_out(state)
                if stopping or measured or is_due(config.checkpoint.every, result.step):
                    _save(checkpoints, state, result, metric=measured.get("accuracy"))
                if stopping and not last:
                    result.signum = signum
    return result, state.params


def next_batch(config: SupervisedConfig, task: Task, *, position: int) -> Minibatch:
    """Returns the minibatch that begins at a position of the data."""

    def choose() -> list[Any]:
        count = config.train.batch_size
        indices = next_indices(len(task.rows), position=position, count=count, seed=config.seed)
        return [task.rows[int(i)] for i in indices]

    return task.pack(task.setup.hosts.on_leader(choose))


def compile_step(config: SupervisedConfig, task: Task) -> tuple[LearnerState, Update]:
    """Returns the state before the first step and the jitted step, which donates its state."""
    setup, learner = task.setup, task.learner
    shardings = state_shardings(
        config.optimizer, learner.init, setup.params, layout=setup.layout, specs=setup.specs
    )
    state = jit(learner.init, out_shardings=shardings)(setup.params)
    return state, jit(learner.step, donate_argnums=0, out_shardings=(shardings, None))


class _Log:
    """Writes the metrics of a run and measures its throughput."""

    def __init__(
        self,
        task: Task,
        tracker: Tracker | NullTracker,
        *,
        state: LearnerState,
        result: FitResult,
        precision: Precision,
    ) -> None:
        self._task, self._tracker, self._result = task, tracker, result
        self._precision = precision
        self._since, self._tokens = time.perf_counter(), 0
        self._logged, self._applied, self._told = result.step, applied_steps(state), False

    def count(self, minibatch: Minibatch) -> None:
        """Counts the tokens of a step."""
        self._tokens += int(np.count_nonzero(fetch(minibatch.batch.segments)))

    def training(self, state: LearnerState, metrics: Metrics) -> None:
        """Waits for the metrics of a step and logs them, with the throughput since the last."""
        last, now = self._result.last | to_floats(metrics), time.perf_counter()
        rate = self._task.setup.optimizer.learning_rate(max(applied_steps(state) - 1, 0))
        last["tokens_per_second"] = self._tokens / (now - self._since)
        last["learning_rate"] = float(np.asarray(rate))
        shown = {name: x for name, x in last.items() if not name.startswith("eval/")}
        if note := absorbed_note(shown, self._tracker.history, precision=self._precision):
            self._tracker.note(note)
        self._tell_skipped(applied_steps(state))
        self._tracker.log(self._result.step, shown)
        self._since, self._tokens, self._result.last = now, 0, last

    def _tell_skipped(self, applied: int) -> None:
        """Shows a line if no step since the last log was applied, once in a row. A loss scale that
        settles or grows skips fewer."""
        done, step = self._result.step - self._logged, self._result.step
        skipped = applied == self._applied and (applied == 0 or done >= _LOG_EVERY)
        if skipped and not self._told:
            self._tracker.note(
                f"step {step}: no gradient of the last {done} steps was finite, so they changed "
                f"nothing ({applied} of {step} steps were applied). Likely: 16-bit overflow, or a "
                "loss that is not a number. Keys: precision, optimizer.learning_rate, model.path"
            )
        self._logged, self._applied, self._told = step, applied, skipped

    def held_out(self, state: LearnerState) -> Numbers:
        """Measures the held-out data and logs the result; empty without such data."""
        measured = self._task.measure(state.params)
        named = {f"eval/{name}": value for name, value in measured.items()}
        if named:
            self._tracker.log(self._result.step, named)
        if self._result.step:
            self._result.last |= named
        return measured


def end_notes(setup: Setup, rendering: Rendering) -> list[str]:
    """Returns a line that names the end of a turn, if it is not the tokenizer's own end."""
    note = end_note(setup.checkpoint.tokenizer, rendering) if setup.hosts.leads else None
    return [] if note is None else [note]


def look_notes(tokenizer: Tokenizer, rows: Sequence[Rollout]) -> list[str]:
    """Returns a line with the first row, its trained tokens marked; none on processes without."""
    shown = [marked_text(tokenizer, one.prompt, one.completion) for one in rows[:1]]
    return [f"the first, trained in ⟦ ⟧: {one_line(text)}" for text in shown]


def too_long_note(key: str, count: int, *, config: SupervisedConfig) -> list[str]:
    """Returns a line about rows of data that were too long; empty if all fit."""
    return [
        f"{key}: dropped {count} rows with more than train.row_length = {config.train.row_length} "
        "tokens"
    ] * (count > 0)
