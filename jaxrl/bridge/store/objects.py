"""Objects in a bucket, on a web server or in a shared directory, through obstore."""

import contextlib
import dataclasses
import importlib.util
import os
import stat
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from jaxrl.bridge.base import UnavailableError
from jaxrl.bridge.in_vllm import auth

SCHEMES = ("s3", "gs", "az", "http", "https", "file")
INSTALL = "pip install 'jaxrl[store]'"

_RETRIES = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}  # obstore: 3 minutes
_TIMEOUT = "60s"  # for a request; a chunk has 2 MiB


class StoreError(UnavailableError):
    """A request to the store failed; the message quotes the store."""


class MissingObjectError(StoreError):
    """The store does not have an object."""


def available() -> bool:
    """Tells whether the packages for stores are installed."""
    return all(map(importlib.util.find_spec, ("obstore", "zstandard")))


def check_url(url: str) -> None:
    """Raises ValueError unless `url` is the address of a store."""
    parts = urllib.parse.urlsplit(url)
    local = not parts.netloc and parts.path.startswith("/")
    where = local if parts.scheme == "file" else parts.hostname
    if parts.scheme not in SCHEMES or not where:
        raise ValueError(
            f"{url!r} is not the address of a store; expected s3://BUCKET/PATH, gs://..., "
            "az://..., https://HOST/PATH or file:///DIRECTORY"
        )
    if parts.username or parts.query or parts.fragment:
        raise ValueError(
            f"the address of the store at {parts.hostname} has more than a host and a path; "
            "credentials belong in the environment (docs/bridge.md)"
        )


def directory_of(url: str) -> Path | None:
    """Returns the directory of a file:// store; None for other stores."""
    parts = urllib.parse.urlsplit(url)
    return Path(urllib.parse.unquote(parts.path)) if parts.scheme == "file" else None


def check_owner(directory: Path) -> None:
    """Raises StoreError if another user than this one and root may replace files in a directory:
    its owner, or everybody. Whoever can do so gives the servers weights of their own."""
    for path in (directory, *directory.parents):
        found = path.stat()
        shared = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or shared:
            why = "everybody may write to it" if shared else "it belongs to another user"
            raise StoreError(
                f"file://{directory} cannot be a store: {path}: {why} and could replace weights; "
                f"name another directory, or correct it (chown, chmod o-w)"
            )


@dataclass(frozen=True)
class Store:
    """A store, or a place in one; raises ValueError if the address is invalid."""

    url: str
    # The servers' key, sent to web servers only. Other stores take their credentials from the
    # variables that their own tools read.
    key: str | None = field(repr=False)

    def __post_init__(self) -> None:
        check_url(self.url)

    def below(self, name: str) -> "Store":
        """Returns the place `name` in this store."""
        return dataclasses.replace(self, url=f"{self.url.rstrip('/')}/{name}")

    def make(self) -> None:
        """Creates the directory of a file:// store, open to its user only. Does nothing for other
        stores.

        Raises:
          StoreError: if others may replace files there, see `check_owner`.
        """
        if (directory := directory_of(self.url)) is None:
            return
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        check_owner(missing[-1].parent if missing else directory)
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)


class Objects:
    """Objects by name below a store's address."""

    def __init__(self, store: Store) -> None:
        """Makes the client without a request; raises StoreError if the packages are not installed,
        or the store cannot be used."""
        url = store.url
        if not available():
            raise StoreError(f"{url} needs the packages obstore and zstandard: {INSTALL}")
        from obstore.store import LocalStore, from_url

        self._url, self._directory = url, directory_of(url)
        with self._named():
            if self._directory is not None:
                self._store: Any = LocalStore(self._directory, automatic_cleanup=True)
                self._lister = self._store
                check_owner(self._directory)
                return
            options: dict[str, Any] = {"retry_config": _RETRIES}
            if url.startswith("http"):  # the environment sets the options of buckets
                options["client_options"] = {
                    "timeout": _TIMEOUT,
                    "allow_http": True,
                    "default_headers": auth.headers(store.key),
                }
            self._store = from_url(url, **options)
            if url.startswith("http"):  # many answer that they cannot list with a server's error
                options["retry_config"] = {"max_retries": 0}
            self._lister = from_url(url, **options)

    def put(self, name: str, data: Any) -> None:
        """Writes an object; it appears whole or not at all. Raises StoreError."""
        with self._named(name):
            self._store.put(name, data, use_multipart=False)

    def get(self, name: str) -> memoryview:
        """Returns an object; raises StoreError, and MissingObjectError if the store lacks it."""
        with self._named(name):
            return memoryview(self._store.get(name).bytes())

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; ignores failures, because a leftover object costs only space."""
        try:
            with self._named():
                self._store.delete(names)
        except StoreError:  # a web server stops at the first that is missing
            for name in names:
                with contextlib.suppress(StoreError), self._named():
                    self._store.delete(name)

    def delete_drafts(self, *, but: str) -> None:
        """Deletes half-written files that a killed process left in a directory, except those whose
        names begin with `but`. `delete` cannot: they have no name in the store."""
        if self._directory is None:
            return
        for path in self._directory.rglob("*#[0-9]*"):
            if not str(path.relative_to(self._directory)).startswith(but):
                path.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Returns all names; an empty list if the store cannot list, like most web servers."""
        with contextlib.suppress(StoreError), self._named():
            return [entry["path"] for page in self._lister.list() for entry in page]
        return []

    @contextlib.contextmanager
    def _named(self, name: str = "") -> Any:
        from obstore.exceptions import BaseError, NotFoundError

        try:
            yield
        except (BaseError, OSError) as error:
            where = f"{self._url.rstrip('/')}/{name}" if name else self._url
            text = str(error).partition("\n\nDebug source:")[0]
            missing = NotFoundError, FileNotFoundError
            kind = MissingObjectError if isinstance(error, missing) else StoreError
            raise kind(f"{where}: {text[:500]}") from error
