"""Forks: a new run, with other keys or inputs, from a checkpoint of another run.

The checkpoint becomes the first one of the new run, so a later start resumes it like any other.
Steps go on counting, and so do schedules and policy versions.
"""

import functools
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.config.bucket import is_bucket, local_directory
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.learner import Checkpoints, MisfitError, Restored
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.copies import copy_of, one_checkpoint
from jaxrl.training.inputs import HELD_OUT, TRAINING, Inputs, has_other, read_inputs
from jaxrl.training.progress import Progress
from jaxrl.training.run_directory import (
    ORDER,
    ResumeError,
    changed_keys,
    holds_checkpoints,
    read_config,
    saved_steps,
)

# Keys that decide the arrays of a state.
_STATE = ("critic.", "loss.", "lora.", "model.", "optimizer.", "precision")
# Other keys than these change what is sampled, or how it is scored.
_TRAIN = ("train.max_kl", "train.steps", "train.updates_per_rollout")
_LEARNER = ("critic.", "loss.", "optimizer.", *_TRAIN, *ORDER)


class Fork(NamedTuple):
    """The checkpoint that a run starts from."""

    run: Path  # directory of its run
    step: int
    changed: dict[str, str]  # keys with other values here, with both in words
    inputs: Inputs  # of its run
    name: str  # of its run, as it was given
    here: Inputs | None = None  # of this run, once they are read

    @property
    def origin(self) -> str:
        """The checkpoint as `starts.jsonl` and reports name it."""
        return f"{_origin(self.name)}@{self.step}"

    def has_other(self, name: str) -> bool:
        """Tells if data differs from that of the fork's run: by content, or by keys where the run
        did not keep its inputs."""
        here = self.here or {}
        if self.inputs:
            return has_other(name, there=self.inputs, here=here)
        return any(key.startswith(("data.", "model.")) for key in self.changed)

    def read(self, like: Any, *, critic: Any = None) -> Restored[Any]:
        """Reads the checkpoint, with the arguments of `Checkpoints.restore`.

        Raises:
          CheckpointError: for a damaged checkpoint, or another model under the same keys.
          ResumeError: if the state does not fit keys that have changed; the message names them.
        """
        directory = self.run / "checkpoints"
        shaping = [text for key, text in self.changed.items() if key.startswith(_STATE)]
        words = f"--fork {self.name}@{self.step}: its state does not fit"
        if critic is not None and not (directory / str(self.step) / "critic").is_dir():
            raise ResumeError(f"{words} a run with a critic: it has none ({'; '.join(shaping)})")
        with closing(Checkpoints.reading(directory)) as checkpoints:
            try:
                return checkpoints.restore(self.step, like, critic=critic)
            except MisfitError as error:
                if not shaping:
                    raise
                raise ResumeError(
                    f"{words}: {'; '.join(shaping)}. Set what shapes the state as it was there: "
                    f"{error}"
                ) from error

    @property
    def note(self) -> str:
        """A line about the fork and all that is other than in its run."""
        here, other = self.here or {}, list(self.changed.values())
        if self.has_other(TRAINING):
            other.append(f"other {TRAINING}, which begin at position 0")
        both = sorted(self.inputs.keys() & here.keys() - {TRAINING})
        other += [f"other {name}" for name in both if self.has_other(name)]
        return f"forked from {self.name}@{self.step}: {'; '.join(other) or 'nothing is changed'}"

    def adapt(self, progress: Progress, *, batch: int) -> None:
        """Adapts the progress at the checkpoint to other keys and data: rollouts that were sampled
        under other keys are dropped. A step trains on `batch` prompts."""
        sampled = [key for key in self.changed if not key.startswith(_LEARNER)]
        other_rows = self.has_other(TRAINING)
        if sampled or other_rows:
            progress.pending, progress.replay, progress.running = [], [], []
            # As if an asynchronous run had trained on all, which bounds what it may sample ahead.
            done = progress.step * batch
            progress.counts = {"sampled": done, "trained": done, "stale": 0, "zero_variance": 0}
        if other_rows:
            progress.position = 0
        if self.has_other(HELD_OUT):
            progress.initial_accuracy = progress.accuracy = progress.held_out = None
        if any(key.startswith("loss.") for key in self.changed):
            progress.coefficients = {}


def find_fork(text: str | None, config: Config | SupervisedConfig) -> Fork | None:
    """Finds the checkpoint RUN or RUN@STEP that a run starts from; None if it has a checkpoint
    of its own, which it resumes, or without a text.

    Raises:
      ResumeError: if there is no such checkpoint, or not one of this kind of run; or if the run
        directory holds a run that did not begin there.
    """
    directory = local_directory(config.run_dir)
    starts = read_metrics(directory / "starts.jsonl")
    began = [start["forked_from"] for start in starts if "forked_from" in start]
    if text is None:
        if began and not holds_checkpoints(directory):
            raise ResumeError(
                f"{directory} began as a fork of {began[0]}, and its checkpoints are gone; give "
                f"--fork {began[0]}, or choose another run_dir"
            )
        return None
    name, step = _parse(text)
    if holds_checkpoints(directory):
        origin, _, at = began[0].rpartition("@") if began else ("", "", "")
        if origin != _origin(name) or str(step or at) != at:
            raise ResumeError(
                f"run_dir = '{directory}' holds a run that did not begin as a fork of {text}; "
                "choose another run_dir, or leave --fork out to resume it"
            )
        return None
    chosen = "latest" if step is None else str(step)
    run = copy_of(name, kind=f"fork-{chosen}", want=functools.partial(one_checkpoint, chosen))
    there = saved_steps(run)
    if not there or step not in (None, *there):
        raise ResumeError(
            f"--fork {text}: there is no such checkpoint; steps in {run / 'checkpoints'}: "
            f"{', '.join(map(str, there)) or 'none'}"
        )
    step = there[-1] if step is None else step
    if step >= config.train.steps:
        raise ResumeError(
            f"train.steps = {config.train.steps} counts from the beginning of {name}, and --fork "
            f"starts after step {step}; raise it"
        )
    changed = changed_keys(read_config(run / "config.toml", type(config)), config)
    return Fork(run, step, changed, read_inputs(run), name)


def _parse(text: str) -> tuple[str, int | None]:
    run, at, step = text.rpartition("@")
    return (run, int(step)) if at and step.isdigit() else (text, None)


def _origin(name: str) -> str:
    """Returns what a run keeps of the name of the run that it began from."""
    return name.rstrip("/") if is_bucket(name) else str(Path(name).resolve())
