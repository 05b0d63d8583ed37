"""Copies of files of runs in buckets, for commands that read runs."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxrl.bridge import Bucket, MissingObjectError, StoreError
from jaxrl.config.bucket import is_bucket, local_directory
from jaxrl.training.manifest import NAME, Entry, read_manifest

_TRIES = 3  # a run deletes objects that it has replaced
_THREADS = 8

Want = Callable[[Iterable[str]], Iterable[str]]
"""The files of a run -> those that are wanted."""


def logs(paths: Iterable[str]) -> Iterable[str]:
    """Chooses what a report reads."""
    return [path for path in paths if "/" not in path and path.endswith((".jsonl", ".toml"))]


def one_checkpoint(step: str, paths: Iterable[str]) -> Iterable[str]:
    """Chooses the checkpoint of a step, the "latest", or all if the "best" must be found, with what
    describes the run."""
    saved = {path: path.split("/")[1] for path in paths if path.startswith("checkpoints/")}
    there = set(saved.values())
    if step != "best":
        named = max(there, key=int, default="") if step == "latest" else step
        there = there & {named} or there
    described = {"config.toml", "inputs.json"} & set(paths)
    return [*described, *(path for path, name in saved.items() if name in there)]


def copy_of(run: str, *, kind: str, want: Want = logs) -> Path:
    """Returns the directory of a run, or brings the copy of a run in a bucket up to date.

    Args:
      run: a directory, or an address in a bucket.
      kind: names the copy, so that commands that want other files do not share it.
      want: chooses the files.

    Raises:
      ValueError: if the bucket has no run there.
      StoreError: if it refuses or does not answer.
    """
    if not is_bucket(run):
        return Path(run)
    url, directory = run.rstrip("/"), local_directory(run, kind=f"copies/{kind}")
    bucket = Bucket(url)
    with ThreadPoolExecutor(_THREADS) as pool:
        for left in reversed(range(_TRIES)):
            try:
                if (found := read_manifest(bucket)) is None:
                    raise ValueError(f"{url} is not a run: there is no {url}/{NAME}")
                files = found[0].files
                wanted = {path: files[path] for path in want(files)}
                _update(directory, wanted, bucket=bucket, pool=pool)
                return directory
            except MissingObjectError:
                if not left:
                    raise
            except StoreError as error:
                raise StoreError(
                    f"{url} cannot be read: {error}. The environment must hold credentials of the "
                    "bucket (docs/buckets.md)"
                ) from error
    raise AssertionError("no try")


def _update(
    directory: Path, wanted: dict[str, Entry], *, bucket: Bucket, pool: ThreadPoolExecutor
) -> None:
    """Downloads the files that are not the same in the copy, and deletes others."""
    directory.mkdir(parents=True, exist_ok=True)
    parts, new = [], []
    for path, entry in wanted.items():
        place = directory / path
        now = place.stat() if place.exists() else None
        if now is not None and (now.st_size, now.st_mtime_ns) == (entry.size, entry.mtime):
            continue
        draft = place.with_name(f"{place.name}.new")
        new.append((draft, place, entry.mtime))
        parts += bucket.download(entry.object, draft, size=entry.size, pool=pool)
    errors = [error for part in parts if (error := part.exception()) is not None]
    if errors:
        raise errors[0]
    for draft, place, mtime in new:
        os.utime(draft, ns=(mtime, mtime))
        draft.replace(place)
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            if Path(folder, name).relative_to(directory).as_posix() not in wanted:
                Path(folder, name).unlink()
        if not os.listdir(folder):
            os.rmdir(folder)
