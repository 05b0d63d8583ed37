"""Objects in a bucket, on a web server or in a shared directory, through obstore."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import stat
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl.bridge.base import UnavailableError
from jaxrl.bridge.in_vllm import auth
from jaxrl.bridge.store.chunks import digest, keyed_digest
from jaxrl.bridge.store.clients import Clients, Silence

SCHEMES = ("s3", "gs", "az", "http", "https", "file")
INSTALL = "pip install 'jaxrl[store]'"

_BLOCK = 1 << 16  # bytes of an object that count as a sign of life
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
# Settings that obstore reads from the environment only if it is given none.
_SETTINGS = (
    "allow_http",
    "allow_invalid_certificates",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "root_certificate",
    "user_agent",
)


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
    # The servers' key, for digests; it is sent to web servers only. Other stores take their
    # credentials from the variables that their own tools read.
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
    """Objects by name below a store's address.

    Attributes:
      url: the address.
      keyed: True if the objects are named by digests that need the servers' key: in stores other
        than a directory, which nobody else may write to.
      digest: of the objects' bytes.
    """

    def __init__(self, store: Store) -> None:
        """Makes the client without a request; raises StoreError if the packages are not installed,
        or the store cannot be used."""
        self.url, self._directory = store.url, directory_of(store.url)
        self.keyed, self.digest = False, digest
        if store.key is not None and self._directory is None:
            self.keyed, self.digest = True, keyed_digest(store.key)
        if not available():
            raise StoreError(f"{self.url} needs the packages obstore and zstandard: {INSTALL}")
        with self._named():
            self._clients = Clients(functools.partial(_client, store))
            if self._directory is not None:
                check_owner(self._directory)

    @property
    def silence(self) -> Silence:
        """Silence of the store."""
        return self._clients.silence

    def put(self, name: str, data: Any) -> None:
        """Writes an object; it appears whole or not at all. Raises StoreError."""
        with self._named(name):
            self._clients.write(lambda client: client.put(name, data, use_multipart=False))

    def get(self, name: str) -> memoryview:
        """Returns an object; raises StoreError, and MissingObjectError if the store lacks it."""

        def get(client: Any) -> bytes:
            blocks = []
            for block in client.get(name).stream(_BLOCK):
                self.silence.heard()
                blocks.append(block)
            return b"".join(blocks)

        with self._named(name):
            return memoryview(self._clients.read(get))

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; ignores failures, because a leftover object costs only space."""
        with contextlib.suppress(StoreError), self._named():
            self._clients.once(lambda client: client.delete(names))
            return
        for name in names:  # a web server stops at the first that is missing
            if self.silence.seconds:  # or it does not answer
                return
            with contextlib.suppress(StoreError), self._named():
                self._clients.once(lambda client, name=name: client.delete(name))

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

        def names(client: Any) -> list[str]:
            return [entry["path"] for page in client.list() for entry in page]

        with contextlib.suppress(StoreError), self._named():
            if self.url.startswith("http"):  # many answer with a server's error
                return names(self._clients.hasty())
            return self._clients.once(names)
        return []

    @contextlib.contextmanager
    def _named(self, name: str = "") -> Any:
        from obstore.exceptions import BaseError, NotFoundError

        try:
            yield
        except (BaseError, OSError) as error:
            where = f"{self.url.rstrip('/')}/{name}" if name else self.url
            text = str(error).partition("\n\nDebug source:")[0]
            if name and (silent := self.silence.seconds) >= 1:
                text = f"no answer for {silent:.0f} s: {text}"
            missing = NotFoundError, FileNotFoundError
            kind = MissingObjectError if isinstance(error, missing) else StoreError
            raise kind(f"{where}: {text[:500]}") from error


def _client(store: Store, options: Any, retries: Any) -> Any:
    from obstore.store import LocalStore, from_url

    scheme = urllib.parse.urlsplit(store.url).scheme
    if (directory := directory_of(store.url)) is not None:
        return LocalStore(directory, automatic_cleanup=True)
    if prefix := _PREFIXES.get(scheme):
        found = {name: os.environ.get(prefix + name.upper()) for name in _SETTINGS}
        options = options | {name: text for name, text in found.items() if text is not None}
    else:
        options = options | {"allow_http": True, "default_headers": auth.headers(store.key)}
    return from_url(store.url, client_options=options, retry_config=retries)
