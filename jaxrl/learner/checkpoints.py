"""Checkpoints of a run: the learner's state as arrays, the host's state as JSON.

A checkpoint is one directory per step. It appears under its name only when complete: a process
killed while saving leaves at most a temporary directory, which the next writer removes. It holds
digests of everything (`digests`), which `restore` checks: storage may change bits without an error.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from jaxrl.core.files import check_regular
from jaxrl.learner.digests import DamagedError, first_damaged, named_leaves, seal, unseal

_DELETED = "deleted"  # holds checkpoints that are being deleted

State = TypeVar("State")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or read; the message names its path."""


class MisfitError(CheckpointError):
    """A checkpoint whose arrays have other names, shapes or dtypes than requested."""


class Restored(NamedTuple, Generic[State]):
    """A checkpoint read by `Checkpoints.restore`."""

    state: State  # as saved, bit for bit, with the requested shardings
    host: dict[str, Any]  # as saved, but tuples have become lists and keys strings
    critic: Any = None  # the critic's state, bit for bit; None if it was not requested


class Checkpoints:
    """The saved states of one run. Saving is asynchronous; call `close` before the process ends. A
    model in the Hugging Face format is a `jaxrl.huggingface.Checkpoint`.

    Every process of a run opens it and calls `save` and `restore` at the same steps. Only one run
    may write to a directory.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, keep_best: int = 1):
        """Opens a directory for writing: creates it if necessary, removes incomplete checkpoints.

        Args:
          directory: holds one directory per step.
          keep: number of latest checkpoints to keep, at least 1.
          keep_best: number of further checkpoints with the largest metric to keep; may be 0.

        Raises:
          CheckpointError: if the directory cannot be made or read.
          ValueError: for numbers that keep nothing.
        """
        if keep < 1 or keep_best < 0:
            raise ValueError(
                f"keep={keep}, keep_best={keep_best}: keep at least the latest checkpoint and not "
                "fewer than 0 of the best"
            )
        self._writable, self._keep, self._keep_best = True, keep, keep_best
        self._open(
            directory,
            options=ocp.CheckpointManagerOptions(
                best_fn=_rank,
                cleanup_tmp_directories=True,
                # Renamed first: a process killed while deleting must not leave half a checkpoint
                # under its name.
                todelete_subdir=_DELETED,
                preservation_policy=managers.AnyPreservationPolicy(
                    [managers.LatestN(n=keep), managers.BestN(get_metric_fn=_rank, n=keep_best)]
                ),
            ),
        )

    @classmethod
    def reading(cls, directory: str | Path) -> "Checkpoints":
        """Opens a directory that another process may be writing to; `save` is an error.

        Raises:
          CheckpointError: if there is no such directory, or it cannot be read.
        """
        if not Path(directory).is_dir():
            raise CheckpointError(f"there are no checkpoints: {directory} is not a directory")
        self = cls.__new__(cls)
        self._writable = False
        self._open(directory, options=ocp.CheckpointManagerOptions(best_fn=_rank, create=False))
        return self

    def _open(self, directory: str | Path, *, options: ocp.CheckpointManagerOptions) -> None:
        self.directory = Path(directory).resolve()
        _check_files(self.directory)
        try:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=options,
                item_handlers={
                    "state": ocp.StandardCheckpointHandler(),
                    "critic": ocp.StandardCheckpointHandler(),
                    "host": ocp.JsonCheckpointHandler(),
                },
            )
        except Exception as error:
            raise CheckpointError(
                f"the checkpoints in {self.directory} cannot be opened: "
                f"{type(error).__name__}: {error}"
            ) from error

    def save(
        self,
        step: int,
        state: Any,
        *,
        host: Mapping[str, Any],
        critic: Any = None,
        metric: float | None = None,
    ) -> None:
        """Starts a save; returns once the state is copied, so that it may be donated.

        Waits for the previous save.

        Args:
          step: of the learner; larger than the step of every existing checkpoint.
          state: a tree of arrays.
          host: all else that the run needs to resume, as JSON: data position, policy version.
          critic: a further tree of arrays, for runs that have a critic.
          metric: larger is better; None if not measured.

        Raises:
          CheckpointError: if this or the previous checkpoint could not be written, for example
            because the disk is full; earlier checkpoints are unchanged.
          ValueError: for a metric that is not finite, or a step that is not new.
          TypeError: for a `host` that JSON cannot hold.
        """
        if not self._writable:
            raise ValueError(f"{self.directory} was opened for reading")
        if metric is not None and not abs(metric) < float("inf"):
            raise ValueError(f"metric={metric} at step {step} cannot be compared; pass None")
        trees = {"state": state} | ({} if critic is None else {"critic": critic})
        sealed = seal(host, trees)
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"step {step} is not new: {self.directory} holds {self._steps()}; resume from "
                "the latest, or write to another directory"
            )
        items: dict[str, Any] = {item: ocp.args.StandardSave(tree) for item, tree in trees.items()}
        items["host"] = ocp.args.JsonSave(sealed)
        metrics = {} if metric is None else {"metric": float(metric)}
        with self._saving():
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def latest_step(self) -> int | None:
        """Returns the step of the last checkpoint; None without one."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Returns the step with the largest metric, the later one of equals; None without one."""
        return best[0] if (best := self.best()) is not None else None

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the largest metric, the later one of equals, and the metric."""
        step = self._manager.best_step()
        metrics = None if step is None else self._manager.metrics(step)
        return (step, float(metrics["metric"])) if step is not None and metrics else None

    def restore(self, step: int, like: State, *, critic: Any = None) -> Restored[State]:
        """Reads one checkpoint.

        Args:
          step: for example `latest_step()`.
          like: a tree of the state's structure whose leaves have shape, dtype and sharding: arrays,
            or `jax.ShapeDtypeStruct`s. The mesh may differ from the saving run's.
          critic: a tree like the critic's state, to restore it as well.

        Raises:
          CheckpointError: if the step does not exist, cannot be read or is damaged.
          MisfitError: if an array has another shape or dtype than requested; the message names the
            first one.
        """
        self.wait()
        path = self.directory / str(step)
        if step not in self._manager.all_steps():
            raise CheckpointError(f"there is no checkpoint {path}; steps there: {self._steps()}")
        wanted = {"state": like} | ({} if critic is None else {"critic": critic})
        arrays = {item: ocp.args.StandardRestore(tree) for item, tree in wanted.items()}
        try:
            for item, tree in wanted.items():
                metadata = self._manager.item_metadata(step)[item]
                if metadata is None:
                    raise FileNotFoundError(f"the list of its arrays ({item}) is missing")
                _check_same(_signature(tree), _signature(metadata.tree), path=path)
            restored = self._manager.restore(
                step, args=ocp.args.Composite(host=ocp.args.JsonRestore(), **arrays)
            )
            host, digests = unseal(restored["host"])
            for item, saved in digests.items():
                if item in wanted and (name := first_damaged(restored[item], saved)) is not None:
                    raise DamagedError(f"the array {item}/{name} is not what was saved")
        except CheckpointError:
            raise
        except Exception as error:
            found = f"cannot be read: {type(error).__name__}: {error}"
            if isinstance(error, DamagedError):
                found = f"is damaged: {error}"
            raise CheckpointError(f"checkpoint {path} {found}. {self._advise(step)}") from error
        return Restored(restored["state"], host, restored.get("critic"))

    def wait(self) -> None:
        """Waits until all saves are on disk; raises CheckpointError as `save`."""
        with self._saving():
            self._manager.wait_until_finished()
        if self._writable and jax.process_index() == 0:
            shutil.rmtree(self.directory / _DELETED, ignore_errors=True)

    def close(self) -> None:
        """Waits for saves and ends the saving threads; raises CheckpointError as `save`. Deletes
        checkpoints that a killed process left behind: there may be no further save to do it."""
        try:
            self.wait()
            if self._writable and jax.process_index() == 0:
                self._delete_left()
        finally:
            self._manager.close()

    def _delete_left(self) -> None:
        steps, aside = sorted(self._manager.all_steps()), self.directory / _DELETED
        ranks = {step: _rank(self._manager.metrics(step) or {}) for step in steps}
        best = sorted(reversed(steps), key=lambda step: -ranks[step])[: self._keep_best]
        for step in set(steps) - {*steps[-self._keep :], *best}:
            aside.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(aside / str(step))
        shutil.rmtree(aside, ignore_errors=True)

    def _advise(self, step: int) -> str:
        """Describes how to resume without a checkpoint that cannot be used."""
        before = [other for other in self._manager.all_steps() if other < step]
        aside = f"mv {self.directory / str(step)} {self.directory.parent / f'damaged_{step}'}"
        if not before:
            return f"There is none before it; to start over, run: {aside}"
        return f"To resume from step {max(before)}, the checkpoint before it, run: {aside}"

    def _steps(self) -> str:
        return ", ".join(map(str, self._manager.all_steps())) or "none"

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._manager.reload()  # drops its list of checkpoints to delete
            raise CheckpointError(
                f"saving to {self.directory} failed; complete checkpoints: {self._steps()}: {error}"
            ) from error


def _check_files(directory: Path) -> None:
    """Rejects files that would block a reader for ever, and metrics that orbax cannot read."""
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            try:
                check_regular(path)
                if path.parts[-2:] == ("metrics", "metrics"):
                    _check_metrics(path)
            except ValueError as error:
                if os.path.lexists(path):  # not removed meanwhile by a run
                    raise CheckpointError(f"the checkpoints cannot be opened: {error}") from None


def _check_metrics(path: Path) -> None:
    try:
        found = json.loads(path.read_bytes())
        valid = isinstance(found, dict) and all(isinstance(x, int | float) for x in found.values())
    except FileNotFoundError:  # removed by a run
        return
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise ValueError(
            f"{path} does not hold a number; it only tells which checkpoint is the best. To resume "
            f"without it, run: rm -r {path.parent}"
        )


def _rank(metrics: Mapping[str, float]) -> float:
    return metrics.get("metric", -float("inf"))


def _signature(tree: Any) -> dict[str, str]:
    """Describes the leaves in the tree's order: {"params/layers/q": "float32[12, 64, 64]", ...}."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(tree).items()}


def _check_same(wanted: dict[str, str], saved: dict[str, str], *, path: Path) -> None:
    for name in (*wanted, *saved):
        there, here = saved.get(name, "missing"), wanted.get(name, "missing")
        if there != here:
            raise MisfitError(
                f"checkpoint {path} was written by another model, optimizer or precision: {name} "
                f"is {there} in the checkpoint and {here} in this run"
            )
