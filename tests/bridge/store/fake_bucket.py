"""Buckets of S3 and of Google's storage, in this process."""

import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, unescape

BUCKET = "a-bucket"


class FakeBucket(ThreadingHTTPServer):
    """A server with one bucket.

    Attributes:
      objects: (number of the version, content) by name.
      refuse: (method, name) -> status of a refusal, or None.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.refuse: Callable[[str, str], int | None] = lambda method, name: None
        self.numbers, self.lock = itertools.count(1), threading.Lock()
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of S3's clients."""
        return {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "something",
        }

    def google_environment(self, directory: Path) -> dict[str, str]:
        """The variables of Google's clients, with their file in a directory."""
        account = {"client_email": "", "private_key": "", "private_key_id": ""}
        account |= {"gcs_base_url": self.endpoint, "disable_oauth": True}  # type: ignore[dict-item]
        path = directory / "account.json"
        path.write_text(json.dumps(account))
        return {"GOOGLE_SERVICE_ACCOUNT": str(path), "GOOGLE_ALLOW_HTTP": "true"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeBucket

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def _do(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        bucket, _, name = urllib.parse.unquote(parts.path).lstrip("/").partition("/")
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        if (status := self.server.refuse(self.command, name)) is not None:
            self._answer(status, b"<Error><Code>Refused</Code></Error>")
        elif bucket != BUCKET:
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif self.command == "PUT":
            self._put(name, sent)
        elif "list-type" in query:
            self._list(query.get("prefix", ""))
        elif self.command == "POST" and "delete" in query:
            for key in re.findall("<Key>(.*?)</Key>", sent.decode()):
                self.server.objects.pop(unescape(key), None)
            self._answer(200, b"<DeleteResult></DeleteResult>")
        elif self.command == "DELETE":
            self.server.objects.pop(name, None)
            self._answer(204, b"")
        else:
            self._get(name)

    for _method in ("PUT", "GET", "HEAD", "POST", "DELETE"):
        locals()[f"do_{_method}"] = _do

    def _put(self, name: str, data: bytes) -> None:
        with self.server.lock:
            now = self.server.objects.get(name, (0, b""))[0]
            etag, generation = self.headers.get("If-Match"), "x-goog-if-generation-match"
            stale = self.headers.get("If-None-Match") == "*" and now
            stale = stale or (etag is not None and etag != f'"{now}"')
            if stale or int(self.headers.get(generation, now)) != now:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            number = next(self.server.numbers)
            self.server.objects[name] = (number, data)
        self._answer(200, b"", number=number)

    def _get(self, name: str) -> None:
        number, data = self.server.objects.get(name, (0, b""))
        if not number:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif (given := self.headers.get("Range")) is not None:
            first, last = map(int, given.removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
            self._answer(206, part, number=number, where=where)
        else:
            self._answer(200, data, number=number)

    def _list(self, prefix: str) -> None:
        found = sorted(item for item in self.server.objects.items() if item[0].startswith(prefix))
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>{number}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, (number, data) in found
        )
        self._answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())

    def _answer(self, status: int, data: bytes, *, number: int = 0, where: str = "") -> None:
        self.send_response(status)
        if number:
            self.send_header("ETag", f'"{number}"')
            self.send_header("x-goog-generation", str(number))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if where:
            self.send_header("Content-Range", where)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
