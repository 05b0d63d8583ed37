"""A headless Chromium, driven through its DevTools protocol over a pipe."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")


class Page:
    """A tab. `errors` holds what scripts threw and the console's errors; `requests` every address
    that the page loaded."""

    def __init__(self, to_browser: Any, from_browser: Any) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._session, self._read = 0, None, b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (found := self._next()).get("id") != self._number:
            pass
        assert "error" not in found, found
        return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            data = os.read(self._from.fileno(), 1 << 20)
            assert data, "the browser has ended"
            self._read += data
        line, self._read = self._read.split(b"\0", 1)
        message = json.loads(line)
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:2000])
        if message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message

    def open(self, path: Path | str, *, width: int, dark: bool) -> None:
        """Opens a file from disk, or an address, in a window of some width."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        url = path if isinstance(path, str) else path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        while self.run("document.readyState") != "complete":
            pass

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def hover(self, selector: str) -> None:
        """Moves the mouse to the middle of an element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for step in (-2, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)


@contextmanager
def open_page(directory: Path) -> Iterator[Page]:
    """A page in a browser of its own, whose profile lies in `directory`."""
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    command = f'exec "$0" "$@" 3<&{read_in} 4>&{write_out}'
    process = subprocess.Popen(
        ["bash", "-c", command, str(CHROMIUM), *_FLAGS, f"--user-data-dir={directory}"],
        pass_fds=(read_in, write_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_in)
    os.close(write_out)
    try:
        with os.fdopen(write_in, "wb") as to, os.fdopen(read_out, "rb", buffering=0) as answers:
            yield Page(to, answers)
    finally:
        process.terminate()
        process.wait()
