"""Stands in for vLLM: takes its command line, is healthy, and misbehaves as argument 1 says.

It makes what vLLM leaves behind: a segment, a semaphore, a socket and a temporary file, and writes
their names with its environment to the file of the second argument. In the mode "has a keeper" a
process outside its group owns its directories as well, as a worker in another container might.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.synchronize
import os
import socket
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

MEMORY, BELONGINGS = Path("/dev/shm"), "belongings"  # as in `owned_directory`
TOKEN = {"choices": [{"token_ids": [5]}]}


class Handler(BaseHTTPRequestHandler):
    """Answers /health, and one more request as the mode says."""

    def log_message(self, *_: object) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:
        """Is always healthy."""
        self.answer(200, {})

    def do_POST(self) -> None:
        """Fails if the mode says so."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["sampling_params"]["max_tokens"] == 1
        assert self.headers["Authorization"] == f"Bearer {os.environ['JAXRL_API_KEY']}"
        mode = sys.argv[1]
        if mode == "fails":
            self.answer(500, {"error": {"message": "EngineCore encountered an issue"}})
        elif mode == "dies":
            print("RuntimeError: Unsupported head size 16 for AMX", flush=True)
            self.answer(500, {"error": {"message": "EngineCore encountered an issue"}})
            os._exit(1)
        elif mode == "hangs":
            time.sleep(300)
        else:
            self.answer(200, {"choices": [{"token_ids": []}]} if mode == "is silent" else TOKEN)

    def answer(self, status: int, body: object) -> None:
        """Sends JSON."""
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def listed(left: list[str]) -> bool:
    """Tells whether the watchdog has found what a killed server leaves in shared memory."""
    found = list[str]()
    for path in MEMORY.glob(f"jaxrl-owned-*/{BELONGINGS}"):
        with contextlib.suppress(OSError):  # another server has just ended
            found += path.read_text().split()
    return {name[1:] for name in left} <= set(found)


def main() -> None:
    """Serves until it is killed."""
    # A killed Python leaves them; its tracker, which is killed with it, would remove them.
    resource_tracker.register = lambda *_: None
    segment = shared_memory.SharedMemory(create=True, size=1000)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ["VLLM_RPC_BASE_PATH"] + "/socket")
    left = ["/" + segment.name.lstrip("/"), "/sem." + semaphore._semlock.name.lstrip("/")]
    temporary = Path(tempfile.gettempdir(), "vllm_dist_0")
    temporary.touch()
    about = {"left": left, "socket": listener.getsockname(), "temporary": str(temporary)}
    about["environment"] = dict(os.environ)
    if sys.argv[1] == "has a keeper":
        keeper = subprocess.Popen(["sleep", "300"], close_fds=False, start_new_session=True)
        about["keeper"] = keeper.pid
    draft = Path(sys.argv[2] + ".draft")
    draft.write_text(json.dumps(about))
    while not listed(left):
        time.sleep(0.05)
    draft.rename(sys.argv[2])
    host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
    ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


main()
