"""The loop of every run that learns from given texts: fine-tuning, a reward model, DPO.

What differs is a `Task`: its batches, its step, and what is measured on held-out data.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.builders.model import attention_note
from jaxrl.builders.optimizer import state_shardings
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.core import precision
from jaxrl.core.batch import Minibatch, TokenBatch
from jaxrl.core.hosts import Hosts
from jaxrl.core.metrics import Metrics, to_floats
from jaxrl.core.packing import interleave
from jaxrl.data import prompts
from jaxrl.learner.policy import LearnerState
from jaxrl.learner.update import taken
from jaxrl.models import huggingface
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.monitoring.tracking.tracking import open_tracker
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.storage.checkpoint import Checkpoints
from jaxrl.training.storage.run_directory import claim, held
from sharding.partition import Layout

_LOG_EVERY = 10  # steps between two looks at the loss, each of which waits for the device

Numbers = dict[str, float]


class HostBatch(NamedTuple):
    """What an optimizer step learns from, before it is placed on devices.

    Attributes:
      batch: numpy arrays, with the rows of all microbatches that there is room for.
      microbatches: how many of them are in use.
    """

    batch: TokenBatch
    microbatches: int


def as_it_is(minibatch: Minibatch) -> Minibatch:
    """The `Task.prepare` of a loss that needs nothing besides the batch."""
    return minibatch


def nothing(params: Params) -> Numbers:
    """The `Task.measure` of a run without held-out data."""
    del params
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a run learns.

    Attributes:
      title: for the live display.
      model: what is trained; its specs say how parameters lie on devices.
      params: those to start from.
      init: params -> state before the first step.
      step: (state, minibatch) -> (state, metrics), to be compiled here.
      learning_rate: optimizer step -> learning rate.
      batch: optimizer step -> its batch; it depends on nothing else, so that a run can be resumed.
      prepare: adds scores to a minibatch that the step needs and that do not change.
      measure: params -> numbers on held-out data; "accuracy" among them chooses the best
        checkpoint.
      notes: said at the start.
    """

    title: str
    model: Model
    params: Params
    init: Callable[[Params], LearnerState]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]
    learning_rate: Any
    batch: Callable[[int], HostBatch]
    prepare: Callable[[Minibatch], Minibatch] = as_it_is
    measure: Callable[[Params], Numbers] = nothing
    notes: Sequence[str] = ()


class Result(NamedTuple):
    """How a run ended.

    Attributes:
      step: optimizer steps taken.
      signum: the signal that ended it early, or None.
      first: what was measured on held-out data before the first step.
      last: the metrics of the last logged step, and what was measured last on held-out data.
      model: directory of the trained model; None if the run was ended early.
    """

    step: int
    signum: int | None
    first: Numbers
    last: Numbers
    model: Path | None


def fit(config: SupervisedConfig, task: Task, *, layout: Layout, eval_every: int = 0) -> Result:
    """Trains for `config.train.steps` steps, or until a signal comes, and saves the model.

    A run that was ended, or killed, goes on from its last checkpoint when it is called again with
    the same config, and computes what it would have computed, bit for bit.

    Raises:
      ResumeError: if the run directory holds a run with another config, or another program trains
        in it.
      CheckpointError: if a checkpoint cannot be written or read.
      ValueError: if `train.attention` is a kernel that cannot be used; says why.
    """
    with held(Path(config.run_dir), Hosts()):
        return _fit(config, task, layout=layout, eval_every=eval_every)


def _fit(config: SupervisedConfig, task: Task, *, layout: Layout, eval_every: int) -> Result:
    directory, steps = Path(config.run_dir), config.train.steps
    attention = attention_note(
        config.train.attention,
        config=task.model.config,
        layout=layout,
        policy=precision.parse(config.precision),
        length=config.train.row_length,
    )
    claim(directory, config)
    shardings = state_shardings(
        config.optimizer, task.init, task.params, layout=layout, specs=task.model.specs
    )
    state = jax.jit(task.init, out_shardings=shardings)(task.params)
    update = jax.jit(task.step, donate_argnums=0, out_shardings=(shardings, None))
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
    )
    step, first, last = 0, {}, {}
    if (found := checkpoints.latest_step()) is not None:
        restored = checkpoints.restore(found, state)
        state, host = restored.state, restored.host
        step, first, last = found, host["first"], host["last"]
    try:
        with (
            Interrupt() as interrupt,
            open_tracker(
                directory, start_step=step, total_steps=steps, title=task.title
            ) as tracker,
        ):
            for note in (attention, *task.notes):
                tracker.note(note)
            if step == 0 and (first := task.measure(state.params)):
                tracker.log(0, _held_out(first))
            since, tokens = time.perf_counter(), 0
            ending = False
            while step < steps and not ending:
                host = task.batch(step)
                tokens += int(np.count_nonzero(host.batch.segments))
                state, metrics = update(state, task.prepare(place(host, layout)))
                step, ending = step + 1, interrupt.signum is not None
                if step % _LOG_EVERY == 0 or step == steps:
                    now, last = time.perf_counter(), last | to_floats(metrics)
                    last["tokens_per_second"] = tokens / (now - since)
                    last["learning_rate"] = used(task, state)
                    tracker.log(step, {k: v for k, v in last.items() if not k.startswith("eval/")})
                    since, tokens = now, 0
                measured = {}
                if step == steps or _due(eval_every, step):
                    measured = task.measure(state.params)
                if measured:
                    tracker.log(step, _held_out(measured))
                    last |= _held_out(measured)
                if step == steps or _due(config.checkpoint.every, step) or ending:
                    checkpoints.save(
                        step,
                        state,
                        host={"first": first, "last": last},
                        metric=measured.get("accuracy"),
                    )
    finally:
        checkpoints.close()
    if step < steps:
        return Result(step, interrupt.signum, first, last, None)
    huggingface.save(
        directory / "model",
        state.params,
        task.model.config,
        dtype=precision.parse(config.precision).params,
        source_dir=config.model.path,
    )
    return Result(step, None, first, last, directory / "model")


def used(task: Task, state: LearnerState) -> float:
    """The learning rate of the last step that was not skipped."""
    return float(np.asarray(task.learning_rate(max(taken(state) - 1, 0))))


def place(host: HostBatch, layout: Layout) -> Minibatch:
    """A batch on the devices."""
    batch = jax.device_put(host.batch, layout.batch(("batch", "length")))
    return Minibatch(batch=batch, microbatches=jnp.int32(host.microbatches))


def take(size: int, *, step: int, config: SupervisedConfig) -> list[int]:
    """Which of `size` texts or pairs an optimizer step learns from."""
    count = config.train.batch_size
    chosen = prompts.next_indices(size, position=step * count, count=count, seed=config.seed)
    return [int(i) for i in chosen]


def rows_for(
    rows: Sequence[Sequence[int]], config: SupervisedConfig
) -> tuple[list[Sequence[int]], int]:
    """Rows placed for a batch with room for one text or pair to a row, so that the step compiles
    once, and the number of microbatches in use."""
    most = -(-config.train.batch_size // config.microbatch_rows)
    return interleave(rows, rows_per_microbatch=config.microbatch_rows, max_microbatches=most)


def left_out(key: str, count: int, config: SupervisedConfig) -> list[str]:
    """What to say of texts or pairs that did not fit into a row; nothing if there are none."""
    return [
        f"{key}: {count} rows have more than train.row_length = {config.train.row_length} tokens "
        "and are left out"
    ] * (count > 0)


def _held_out(numbers: Numbers) -> Numbers:
    return {f"eval/{name}": value for name, value in numbers.items()}


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
