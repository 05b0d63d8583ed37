"""The directory of a run: it holds one run, whose config it keeps."""

import fcntl
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxrl.config import toml_file
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core.files import write_whole
from jaxrl.core.hosts import Hosts

# Keys that may change between the parts of one run: they do not change what a step computes.
_FREE = (
    "run_dir",
    "checkpoint.",
    "eval.",
    "data.eval_",
    "alarms.",
    "hosts.",
    "probe.",
    "reward.timeout",
    "samples.",
    "sampler.arguments",
    "sampler.kv_cache_bytes",
    "sampler.max_requests",
    "sampler.port",
    "sampler.python",
    "sampler.timeout",
    "sampler.url",
    "strict_precision",
    "tracking.",
    "train.profile_steps",
)
# These only change in which order numbers are added.
_ORDER = ("mesh.", "train.attention", "train.microbatch_tokens", "train.remat")


_PATIENCE = 5.0  # seconds: a network file system may show a new file late
_PACKAGES = (
    "jaxrl",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "numpy",
)


class ResumeError(ValueError):
    """The run directory holds another run."""


@contextmanager
def held(directory: Path, hosts: Hosts) -> Iterator[None]:
    """Makes the run directory, and keeps other programs from training in it for the block; one
    that is then empty is removed again. All processes of the run must enter it.

    Raises:
      ResumeError: if another program trains in it.
      ValueError: on all of them, if it is not one directory for all: a checkpoint of which each
        sees its own part is never complete, and they would wait for it for ever.
    """
    with ExitStack() as stack:

        def lock() -> None:
            stack.callback(os.close, _lock(directory))

        hosts.led(lock)
        try:
            _check_shared(directory, hosts)
            yield
        finally:
            if hosts.leads:
                with suppress(OSError):  # it is not empty
                    directory.rmdir()


def _lock(directory: Path) -> int:
    """Makes the directory; a file descriptor of it, locked until it is closed or we die."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ResumeError(
            f"another program trains in {directory}, and its metrics and checkpoints would mix "
            "with ours; wait until it ends, or choose another run_dir"
        ) from error
    except OSError:
        pass  # a file system without locks
    return descriptor


def _check_shared(directory: Path, hosts: Hosts) -> None:
    if hosts.count == 1:
        return
    # No name that was looked for before: a file system may remember what was not there, too.
    token = directory / hosts.share(f"seen_by_all_{secrets.token_hex(8)}")
    hosts.led(token.touch)
    blind = hosts.largest(0 if _appears(token) else hosts.index)  # process 0 has made it
    hosts.led(token.unlink)
    if blind:
        raise ValueError(
            f"run_dir = {str(directory)!r} is not the same directory on all hosts: process {blind} "
            "does not see what process 0 writes there; put it on storage that they share"
        )


def _appears(path: Path) -> bool:
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def claim(directory: Path, config: Config | SupervisedConfig) -> str | None:
    """Writes the resolved config into the run directory, or checks that the one there agrees.

    Returns:
      What a user should know of a run that goes on otherwise than it began.

    Raises:
      ResumeError: if the directory holds a run with another config; the message names the keys.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path, saved, note = directory / "config.toml", directory / "checkpoints", None
    # A run that could not begin has saved nothing, and may begin otherwise.
    if path.exists() and saved.exists() and any(saved.iterdir()):
        there = toml_file.flatten(toml_file.load(type(config), file=path))
        here = toml_file.flatten(config)
        free = _FREE if config.optimizer.schedule != "constant" else (*_FREE, "train.steps")
        order = _ORDER if isinstance(config, Config) else ()
        changed = {
            key: f"{key} = {there.get(key)!r} there and {here.get(key)!r} here"
            for key in sorted(there.keys() | here.keys())
            if there.get(key) != here.get(key) and not key.startswith(free)
        }
        if others := [text for key, text in changed.items() if not key.startswith(order)]:
            raise ResumeError(
                f"{directory} holds a run with another config: {'; '.join(others)}. Choose "
                "another run_dir, or delete it to start again"
            )
        if changed:
            note = (
                f"{'; '.join(changed.values())}: the run goes on, and what it computes is the "
                "same up to rounding"
            )
    write_whole(path, toml_file.dumps(config))
    return note


def note_start(directory: Path, *, step: int, devices: Sequence[Any]) -> None:
    """Adds a line to starts.jsonl: when a program began or went on, and with what.

    Args:
      directory: of the run.
      step: that it has done.
      devices: that it computes on.
    """
    entry = {
        "time": round(time.time(), 3),
        "step": step,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processors": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    with (directory / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # jaxrl, where nobody installed it
        return "from its source"
