"""A stand-in of the Hugging Face hub on this machine, which has one model, `lab/tiny`."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMITS = {"main": "1" * 40, "v1": "2" * 40}


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Serves a directory as the hub does: its commits, and its files at each of them; yields the
    address."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0].strip("/")
            commit = COMMITS.get(path.rpartition("/")[2])
            if path.startswith("api/models/lab/tiny/revision/") and commit:
                files = [{"rfilename": file.name} for file in model.iterdir()]
                return self.answer(json.dumps({"id": "lab/tiny", "sha": commit, "siblings": files}))
            if path.startswith("api/models/lab/tiny/tree/"):
                files = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name}
                    for f in model.iterdir()
                ]
                return self.answer(json.dumps(files))
            for commit in COMMITS.values():
                file = model / path.removeprefix(f"lab/tiny/resolve/{commit}/")
                if path.startswith(f"lab/tiny/resolve/{commit}/") and file.is_file():
                    return self.answer(file.read_bytes(), commit=commit, etag=f'"{file.name}"')
            missing = "RevisionNotFound" if "lab/tiny" in path else "RepoNotFound"
            return self.answer(b"", status=404, error=missing)

        def answer(self, body, *, status=200, commit=None, etag=None, error=None):
            body = body.encode() if isinstance(body, str) else body
            self.send_response(status)
            headers = {"X-Repo-Commit": commit, "ETag": etag, "X-Error-Code": error}
            for name, value in headers.items():
                if value is not None:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
