"""The loop of supervised runs: fine-tuning, a reward model, DPO.

A `Task` holds the differences between them: the batches, the step, and the held-out measurements.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from jaxrl.builders.model import attention_note
from jaxrl.builders.optimizer import state_shardings
from jaxrl.builders.supervised import Setup
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core.batch import Minibatch
from jaxrl.core.hosts import Hosts
from jaxrl.core.metrics import Metrics, to_floats
from jaxrl.core.precision import jit
from jaxrl.data import prompts
from jaxrl.learner.policy import Learner, LearnerState
from jaxrl.learner.reward_model import Ranker
from jaxrl.learner.update import applied_steps
from jaxrl.models import huggingface
from jaxrl.models.spec import Params
from jaxrl.monitoring.tracking.tracking import Tracker, gap, incomplete_logs, open_tracker
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.schedule import is_due
from jaxrl.training.storage.checkpoint import Checkpoints
from jaxrl.training.storage.run_directory import check_config, lock
from sharding.transfer import fetch

_LOG_EVERY = 10  # steps between two readings of the loss, each of which waits for the device

Numbers = dict[str, float]
Update = Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A supervised objective with its data.

    Attributes:
      title: of the live display.
      setup: the model, and the optimizer of its learner.
      learner: not compiled.
      batch: optimizer step -> its minibatch. It depends on nothing else, so that a run can resume.
      prepare: adds scores that the step needs and that do not change.
      measure: params -> numbers on held-out data; "accuracy" among them selects the best
        checkpoint.
      eval_every: steps between two measurements; 0 measures only before the first step and after
        the last.
      notes: lines shown at the start.
    """

    title: str
    setup: Setup
    learner: Learner | Ranker
    batch: Callable[[int], Minibatch]
    prepare: Callable[[Minibatch], Minibatch] = lambda minibatch: minibatch
    measure: Callable[[Params], Numbers] = lambda params: {}
    eval_every: int = 0
    notes: Sequence[str] = ()


@dataclasses.dataclass
class Result:
    """The outcome of a supervised run.

    Attributes:
      step: optimizer steps taken.
      first: held-out measurements before the first step.
      last: the metrics of the last logged step, and the last held-out measurements.
      signum: the signal that ended it early, or None.
      model: directory of the trained model; None if the run ended early.
    """

    step: int = 0
    first: Numbers = dataclasses.field(default_factory=dict)
    last: Numbers = dataclasses.field(default_factory=dict)
    signum: int | None = None
    model: Path | None = None


def fit(config: SupervisedConfig, task: Task) -> Result:
    """Trains for `config.train.steps` steps, or until a signal, and saves the model.

    A run that was stopped or killed resumes from its last checkpoint when it is called again with
    the same config, and computes the same parameters bit for bit.

    Raises:
      ResumeError: if the run directory holds a run with another config, or another program trains
        in it.
      CheckpointError: if a checkpoint cannot be written or read.
      ValueError: if the kernel of `train.attention` cannot be used; the message gives the reason.
    """
    directory, setup = Path(config.run_dir), task.setup
    with lock(directory, Hosts()):
        attention = attention_note(
            config, setup.model, layout=setup.layout, length=config.train.row_length
        )
        check_config(directory, config)
        kept = config.checkpoint
        checkpoints = Checkpoints(
            directory / "checkpoints", keep=kept.keep, keep_best=kept.keep_best
        )
        with closing(checkpoints):
            notes = (*incomplete_logs(directory), attention, *task.notes)
            result, params = _train(config, task, checkpoints=checkpoints, notes=notes)
        if result.step == config.train.steps:
            result.model = directory / "model"
            huggingface.save(
                result.model,
                params,
                setup.model.config,
                dtype=config.policy.params,
                source_dir=config.model.path,
            )
        return result


def _train(
    config: SupervisedConfig, task: Task, *, checkpoints: Checkpoints, notes: Sequence[str]
) -> tuple[Result, Params]:
    (state, update), result = compile_step(config, task), Result()
    if (step := checkpoints.latest_step()) is not None:
        found = checkpoints.restore(step, state)
        state, result = found.state, Result(step, **found.host)
        notes = [*notes, *filter(None, [found.note])]
    with (
        Interrupt() as interrupt,
        open_tracker(
            config.run_dir,
            start_step=result.step,
            total_steps=config.train.steps,
            title=task.title,
        ) as tracker,
    ):
        missing = gap(tracker.history, step=result.step, every=_LOG_EVERY)
        for note in (*notes, *filter(None, [missing])):
            tracker.note(note)
        log = _Log(task, tracker, result=result)
        if result.step == 0:
            result.first = log.held_out(state)
        stopping = result.step == config.train.steps
        while not stopping:
            minibatch = task.batch(result.step)
            state, metrics = update(state, task.prepare(minibatch))
            result.step += 1
            last = result.step == config.train.steps
            stopping = last or interrupt.signum is not None
            log.count(minibatch)
            if last or is_due(_LOG_EVERY, result.step):
                log.training(state, metrics)
            measured: Numbers = {}
            if last or is_due(task.eval_every, result.step):
                measured = log.held_out(state)
            if stopping or is_due(config.checkpoint.every, result.step):
                host = {"first": result.first, "last": result.last}
                checkpoints.save(result.step, state, host=host, metric=measured.get("accuracy"))
        if result.step < config.train.steps:
            result.signum = interrupt.signum
    return result, state.params


def compile_step(config: SupervisedConfig, task: Task) -> tuple[LearnerState, Update]:
    """Returns the state before the first step and the jitted step, which donates its state."""
    setup, learner = task.setup, task.learner
    shardings = state_shardings(
        config.optimizer, learner.init, setup.params, layout=setup.layout, specs=setup.model.specs
    )
    state = jit(learner.init, out_shardings=shardings)(setup.params)
    return state, jit(learner.step, donate_argnums=0, out_shardings=(shardings, None))


class _Log:
    """Writes the metrics of a run and measures its throughput."""

    def __init__(self, task: Task, tracker: Tracker, *, result: Result) -> None:
        self._task, self._tracker, self._result = task, tracker, result
        self._since, self._tokens = time.perf_counter(), 0

    def count(self, minibatch: Minibatch) -> None:
        """Counts the tokens of a step."""
        self._tokens += int(np.count_nonzero(fetch(minibatch.batch.segments)))

    def training(self, state: LearnerState, metrics: Metrics) -> None:
        """Logs the metrics of a step, which it waits for, with the throughput since the last."""
        last, now = self._result.last | to_floats(metrics), time.perf_counter()
        rate = self._task.setup.optimizer.learning_rate(max(applied_steps(state) - 1, 0))
        last["tokens_per_second"] = self._tokens / (now - self._since)
        last["learning_rate"] = float(np.asarray(rate))
        shown = {name: x for name, x in last.items() if not name.startswith("eval/")}
        self._tracker.log(self._result.step, shown)
        self._since, self._tokens, self._result.last = now, 0, last

    def held_out(self, state: LearnerState) -> Numbers:
        """Measures the held-out data and logs the result; empty without such data."""
        measured = self._task.measure(state.params)
        named = {f"eval/{name}": value for name, value in measured.items()}
        if named:
            self._tracker.log(self._result.step, named)
        if self._result.step:
            self._result.last |= named
        return measured


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
