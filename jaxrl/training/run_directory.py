"""The run directory: it holds one run and its config, and only one program may use it."""

import fcntl
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from jaxrl.config import toml_file
from jaxrl.config.bucket import local_directory
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import Hosts, check_regular, write_whole
from jaxrl.sharding import Layout
from jaxrl.tracking.tracker import NullTracker, Tracker, open_tracker, read_metrics, write_lines

C = TypeVar("C", bound=Config | SupervisedConfig)

# Keys that may change when a run resumes: they do not change the result of a step.
_FREE = (
    "run_dir",
    "checkpoint.",
    "eval.",
    "data.eval_",
    "alarms.",
    "fleet.",
    "hosts.",
    "judge.",
    "probe.",
    "reward.timeout",
    "samples.",
    "sampler.kv_cache_bytes",
    "sampler.max_requests",
    "sampler.python",
    "sampler.sleep",
    "sampler.store",
    "sampler.timeout",
    "sampler.url",
    "sampler.vllm_args",
    "tracking.",
    "train.profile_steps",
)
# These change only the order in which numbers are added.
ORDER = (
    "critic_mesh.",
    "mesh.",
    "reference.server",
    "reference_mesh.",
    "reward_mesh.",
    "train.attention",
    "train.microbatch_tokens",
    "train.remat",
)
_TOKEN = "seen_by_all_"  # prefix of a temporary file
_GLANCE = 0.1  # seconds, more than a program holds the lock that looks if the run trains
_PATIENCE = 5.0  # seconds: a network file system may show a new file late
_PACKAGES = ("jaxrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


class ResumeError(ValueError):
    """The run directory cannot be resumed with this config."""


@contextmanager
def lock(directory: Path, hosts: Hosts) -> Iterator[None]:
    """Creates the run directory and locks it against other programs for the block; an empty
    directory is removed at the end. All processes of the run must enter it.

    Raises:
      ResumeError: if another program trains in it.
      ValueError: on every process, if they do not share the directory, which checkpoints need.
    """
    with ExitStack() as stack:

        def acquire() -> None:
            stack.callback(os.close, _open_locked(directory))
            for left in directory.glob(f"{_TOKEN}*"):  # of a killed program
                left.unlink(missing_ok=True)

        hosts.on_leader(acquire)
        try:
            check_shared(directory, hosts, key="run_dir")
            yield
        finally:
            if hosts.leads:
                with suppress(OSError):  # it is not empty
                    directory.rmdir()


def _open_locked(directory: Path) -> int:
    """Creates the directory; returns its file descriptor, locked until it is closed."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise ResumeError(f"run_dir = '{directory}' cannot be used: {error.strerror}") from error
    for last in (False, True):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if last:
                os.close(descriptor)
                raise ResumeError(
                    f"another program trains in {directory}; wait until it ends, or choose another "
                    "run_dir"
                ) from error
            time.sleep(_GLANCE)
        except OSError:
            break  # a file system without locks
    return descriptor


def check_shared(directory: Path, hosts: Hosts, *, key: str) -> None:
    """Checks that all processes see the same directory; all must call it.

    Raises:
      ValueError: on every process, if they do not. It names `key`.
    """
    if hosts.count == 1:
        return
    # A fresh name, since a file system may cache that a file does not exist.
    token = directory / hosts.share(f"{_TOKEN}{secrets.token_hex(8)}")
    hosts.on_leader(token.touch)
    blind = hosts.largest(0 if _appears(token) else hosts.index)  # never process 0, which made it
    hosts.on_leader(token.unlink)
    if blind:
        raise ValueError(
            f"{key} = {str(directory)!r} is not the same directory on all hosts: process {blind} "
            "does not see files of process 0 there; use shared storage"
        )


def _appears(path: Path) -> bool:
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def check_config(directory: Path, config: Config | SupervisedConfig) -> str | None:
    """Writes a config into the run directory if it fits; returns and raises as `compare_config`."""
    directory.mkdir(parents=True, exist_ok=True)
    note = compare_config(directory, config)
    write_whole(directory / "config.toml", toml_file.dumps(config))
    return note


def compare_config(directory: Path, config: Config | SupervisedConfig) -> str | None:
    """Checks a config against the config of the run in the directory.

    Returns:
      A line about changed keys that affect results by rounding only; None without such keys.

    Raises:
      ResumeError: if the directory holds a run with another config (the message names the keys) or
        of more steps, or checkpoints whose config cannot be read.
    """
    if not (steps := saved_steps(directory)):
        return None  # there is nothing to resume
    changed = changed_keys(read_config(directory / "config.toml", type(config)), config)
    if others := [text for key, text in changed.items() if not key.startswith(ORDER)]:
        raise ResumeError(
            f"{directory} holds a run with another config: {'; '.join(others)}. Choose another "
            f"run_dir, with --fork {directory} to go on from its last checkpoint under these keys, "
            "or delete this one to start over"
        )
    if max(steps) > config.train.steps:
        raise ResumeError(
            f"train.steps = {config.train.steps}, and the run in {directory} has done {max(steps)} "
            "steps; raise it, or write an earlier checkpoint with jaxrl export --step"
        )
    if changed:
        return f"{'; '.join(changed.values())}: resuming; results stay the same up to rounding"
    return None


def holds_checkpoints(directory: Path) -> bool:
    """Tells if a run directory has something to resume."""
    return bool(saved_steps(directory))


def saved_steps(directory: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, in order."""
    return sorted(int(p.name) for p in (directory / "checkpoints").glob("*") if p.name.isdigit())


def changed_keys(there: C, here: C) -> dict[str, str]:
    """Returns the keys in which two configs differ and that a resume may not change, each with both
    values in words."""
    free = _FREE if here.optimizer.schedule != "constant" else (*_FREE, "train.steps")
    old, new = toml_file.flatten(there), toml_file.flatten(here)
    return {
        key: f"{key} = {toml_file.toml_text(old.get(key))} there and "
        f"{toml_file.toml_text(new.get(key))} here"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(free)
    }


def read_config(path: Path, schema: type[C]) -> C:
    """Reads the config.toml of a run; raises ResumeError if it is missing or of another kind."""
    advice = (
        "It is the config that the checkpoints belong to: put it back, or choose another run_dir"
    )
    if not os.path.lexists(path):
        raise ResumeError(f"{path} is missing. {advice}")
    try:
        check_regular(path)
        return toml_file.load(schema, file=path)
    except ValueError as error:
        raise ResumeError(f"{path} is not the config of a run: {error}. {advice}") from None


def open_run_tracker(
    config: Config | SupervisedConfig,
    *,
    step: int,
    hosts: Hosts,
    layout: Layout,
    origin: str | None = None,
    **options: Any,
) -> AbstractContextManager[Tracker | NullTracker]:
    """Records the start of a run after `step` steps and opens its tracker, on process 0; opens a
    NullTracker on the others. `options` are further ones of `open_tracker`."""
    if not hosts.leads:
        return nullcontext(NullTracker())
    directory = local_directory(config.run_dir)
    record_start(directory, step=step, devices=list(layout.mesh.devices.flat), origin=origin)
    return open_tracker(directory, start_step=step, total_steps=config.train.steps, **options)


def record_start(
    directory: Path, *, step: int, devices: Sequence[Any], origin: str | None = None
) -> None:
    """Appends the time, devices, host and versions of a start after `step` steps to starts.jsonl,
    and the checkpoint RUN@STEP that it forked, if any."""
    path = directory / "starts.jsonl"
    entry = {
        "time": round(time.time(), 3),
        "step": step,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "host": platform.node(),
        "processors": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    } | ({} if origin is None else {"forked_from": origin})
    write_lines(path, [*read_metrics(path), entry])  # an appended line would join an incomplete one


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # jaxrl itself, where it is not installed
        return "source tree"
