"""nginx as a store, with the config of `configs/store_nginx.conf`."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl.bridge import free_port

CONFIG = Path(__file__).parents[2] / "configs" / "store_nginx.conf"


@contextmanager
def web_store(directory: Path, *, key: str) -> Iterator[int]:
    """Runs nginx below a new directory; yields its port on loopback."""
    for name in ("objects", "tmp"):
        (directory / name).mkdir(parents=True)
    (directory / "key").write_text(f'"Bearer {key}" 1;')
    port = free_port("127.0.0.1", 0)
    text = CONFIG.read_text().replace("listen 9000", f"listen 127.0.0.1:{port}")
    if os.getuid() == 0:
        text = f"user {Path.home().owner()};\n{text}"  # or its workers could not write here
    (directory / CONFIG.name).write_text(text)
    with subprocess.Popen(["nginx", "-p", str(directory), "-c", CONFIG.name]) as process:
        try:
            wait_for(port, process)
            yield port
        finally:
            process.terminate()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a server listens; raises RuntimeError if it has ended."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args} ended with {process.returncode}") from None
            time.sleep(0.05)
