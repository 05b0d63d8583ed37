"""Files in a bucket, and objects that two programs cannot both replace."""

from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.bridge.store.objects import MissingObjectError, Objects, Store, StoreError

_PART = 16 * 2**20  # bytes that one request carries
_MOST_PARTS = 5_000  # of an object; S3 takes 10,000


class ReplacedError(StoreError):
    """Another program has written the object since it was read."""


class Known(NamedTuple):
    """An object as it was read or written."""

    data: bytes
    version: Any  # what the bucket knows it by


class Bucket(Objects):
    """A place in a bucket. Credentials come from the variables that obstore reads, such as
    AWS_ACCESS_KEY_ID or GOOGLE_SERVICE_ACCOUNT.

    Attributes:
      url: the address, such as s3://BUCKET/PATH.
    """

    def __init__(self, url: str) -> None:
        """Makes the client without a request; raises StoreError as `Objects`."""
        super().__init__(Store(url, None))

    def read(self, name: str) -> Known | None:
        """Returns an object; None if the bucket lacks it. Raises StoreError."""

        def get(client: Any) -> Known:
            found = client.get(name)
            return Known(bytes(found.bytes()), _version(found.meta))

        try:
            with self._named(name):
                return self._clients.read(get)
        except MissingObjectError:
            return None

    def replace(self, name: str, data: bytes, *, seen: Known | None) -> Known:
        """Writes an object if it is still as `seen`, or still missing for None.

        Raises:
          ReplacedError: if it is not.
          StoreError: if the bucket refuses or does not answer; the object may be written.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode = "create" if seen is None else seen.version

        def put(client: Any) -> Known:
            return Known(data, _version(client.put(name, data, mode=mode, use_multipart=False)))

        try:
            with self._named(name):
                return self._clients.write(put)
        except StoreError as error:
            if not isinstance(error.__cause__, AlreadyExistsError | PreconditionError):
                raise
            now = self.read(name)
            if now is not None and now.data == data:  # an earlier try, whose answer was lost
                return now
            raise ReplacedError(str(error)) from error

    def upload(self, path: Path, name: str) -> None:
        """Writes a file as an object; it appears whole or not at all. Raises StoreError."""
        size = path.stat().st_size
        part = max(_PART, -(-size // _MOST_PARTS))
        with self._named(name):
            self._clients.write(
                lambda client: client.put(
                    name, path, chunk_size=part, use_multipart=size > part, max_concurrency=4
                )
            )

    def download(self, name: str, path: Path, *, size: int, pool: Executor) -> list[Future[None]]:
        """Creates a file for the first `size` bytes of an object; returns what fills it. The
        results raise StoreError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
        starts = range(0, size, _PART)
        return [
            pool.submit(self._fill, name, path, start, min(_PART, size - start)) for start in starts
        ]

    def _fill(self, name: str, path: Path, start: int, length: int) -> None:
        def get(client: Any) -> bytes:
            return bytes(client.get_range(name, start=start, length=length))

        with self._named(name):
            data = self._clients.read(get)
        if len(data) != length:
            raise StoreError(f"{self.url}/{name}: {len(data)} of {length} bytes from {start}")
        with path.open("r+b") as file:
            file.seek(start)
            file.write(data)


def _version(found: Any) -> dict[str, Any]:
    return {key: found[key] for key in ("e_tag", "version") if found[key] is not None}
