"""Runs in a bucket: their addresses, and the directories that stand for them on this machine."""

import hashlib
import urllib.parse
from pathlib import Path

from jaxrl.core import cache_directory

_SCHEMES = ("s3", "gs")


def is_bucket(place: str) -> bool:
    """Tells if a text is an address in a bucket, s3://... or gs://..., and not a path."""
    return place.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))


def check_run_dir(text: str) -> str:
    """Returns the path or address of a run, without a slash at its end; raises ValueError for the
    address of something else."""
    if "://" not in text:
        return text
    parts = urllib.parse.urlsplit(text)
    folders = parts.path.strip("/").split("/")
    plain = all(name and not name.startswith(".") for name in (parts.netloc, *folders))
    if not (is_bucket(text) and plain) or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(
            "expected a directory, s3://BUCKET/PATH or gs://BUCKET/PATH, without names that begin "
            "with a dot"
        )
    return text.rstrip("/")


def local_directory(run_dir: str, *, kind: str = "runs") -> Path:
    """Returns the directory that a run writes to: `run_dir` itself, or the mirror of its bucket in
    the folder `kind` of the user's cache. Raises as `check_run_dir`."""
    if not is_bucket(run_dir):
        return Path(run_dir)
    address = check_run_dir(run_dir)
    name = hashlib.sha256(address.encode()).hexdigest()[:12]
    return cache_directory() / kind / name / address.rpartition("/")[2]
