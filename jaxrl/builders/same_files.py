"""Compares files that every process of a run reads for itself: with other ones on one host, the
processes would compute something in between, without an error."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrl.core import Hosts
from jaxrl.huggingface import fingerprint

Digests = Callable[[], Mapping[str, str]]
"""Returns the digests of files by their names."""


def check_same_files(name: str, place: str | Path, digests: Digests, hosts: Hosts) -> None:
    """Checks that all processes of a run read the same files; all must call it.

    Args:
      name: what the files are, in the plural.
      place: their directory, or the file.
      digests: called with several processes only.
      hosts: the processes.

    Raises:
      ValueError: on every process, if the files differ. It names the first process that differs
        from process 0, and the first file.
    """
    if hosts.count == 1:
        return
    (_, ours), *others = hosts.gather((str(place), dict(digests())))
    for process, (other, theirs) in enumerate(others, start=1):
        if ours != theirs:
            names = sorted(ours.keys() | theirs.keys())
            file = next(file for file in names if ours.get(file) != theirs.get(file))
            raise ValueError(
                f"processes 0 and {process} read different {name}: {file} is another one in "
                f"{other} of process {process}; copy one of them to all hosts"
            )


def check_same_functions(functions: Mapping[str, str | None], hosts: Hosts) -> None:
    """Checks `check_same_files` of the files that keys of a config name as `file.py:function`, by
    key; other functions are those of installed packages. All processes must have the same keys."""
    for key, function in functions.items():
        file = Path((function or "").rpartition(":")[0])
        if file.suffix == ".py":
            digests = functools.partial(fingerprint, [file])
            check_same_files(f"files of {key}", file.parent, digests, hosts)
