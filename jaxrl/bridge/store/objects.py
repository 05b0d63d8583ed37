"""Objects in a bucket, below a web server's address or in a shared directory, through obstore."""

import contextlib
import dataclasses
import importlib.util
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

# Of requests that fail on their way; obstore's own default is 3 minutes.
_RETRIES = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}
_TIMEOUT = "60s"  # of a request; a chunk has 2 MiB


class StoreError(UnavailableError):
    """The store did not take or give an object; the message quotes it."""


def available() -> bool:
    """Tells whether the packages of a store are installed."""
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
    """Returns the directory of a store that is one; None for others."""
    parts = urllib.parse.urlsplit(url)
    return Path(urllib.parse.unquote(parts.path)) if parts.scheme == "file" else None


@dataclass(frozen=True)
class Store:
    """A store, or a place in one. Raises ValueError if the address is invalid.

    Attributes:
      url: its address.
      key: the servers' key, which a web server gets. Other stores take their credentials from the
        environment, as their own tools name them.
    """

    url: str
    key: str | None = field(repr=False)

    def __post_init__(self) -> None:
        check_url(self.url)

    def below(self, name: str) -> "Store":
        """Returns the place of this name."""
        return dataclasses.replace(self, url=f"{self.url.rstrip('/')}/{name}")

    def make(self) -> None:
        """Makes the directory of a store that is one; others need none."""
        if (directory := directory_of(self.url)) is not None:
            directory.mkdir(parents=True, exist_ok=True)


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
                return
            options: dict[str, Any] = {"retry_config": _RETRIES}
            if url.startswith("http"):  # a bucket's are those of the environment
                options["client_options"] = {
                    "timeout": _TIMEOUT,
                    "allow_http": True,
                    "default_headers": auth.headers(store.key),
                }
            self._store = from_url(url, **options)

    def put(self, name: str, data: Any) -> None:
        """Writes an object; it appears whole or not at all. Raises StoreError."""
        with self._named(name):
            self._store.put(name, data, use_multipart=False)

    def get(self, name: str) -> memoryview:
        """Returns an object; raises StoreError."""
        with self._named(name):
            return memoryview(self._store.get(name).bytes())

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects as far as the store lets it: what stays costs space and does no harm."""
        with contextlib.suppress(StoreError), self._named():
            self._store.delete(names)

    def delete_drafts(self, *, but: str) -> None:
        """Deletes objects of a directory that a killed process had begun to write, except those
        whose names begin with `but`. Such files have no name in the store."""
        if self._directory is None:
            return
        for path in self._directory.rglob("*#[0-9]*"):
            if not str(path.relative_to(self._directory)).startswith(but):
                path.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Returns all names; none if the store cannot list them, like most web servers."""
        with contextlib.suppress(StoreError), self._named():
            return [entry["path"] for page in self._store.list() for entry in page]
        return []

    @contextlib.contextmanager
    def _named(self, name: str = "") -> Any:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            where = f"{self._url.rstrip('/')}/{name}" if name else self._url
            text = str(error).partition("\n\nDebug source:")[0]
            raise StoreError(f"{where}: {text[:500]}") from error
