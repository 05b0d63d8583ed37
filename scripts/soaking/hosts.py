"""Three stand-ins for machines with servers: each has an agent, a key and links of its own."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
from benchmarks.link import Link
from experiments.served import COMMAND, processes

from jaxrl.bridge import free_port

KEY = "the-key-of-a-soak"
LEASE = 10  # seconds
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # three on few cores
HEADERS = {"Authorization": f"Bearer {KEY}"}
_PROMPT = [5, 7, 9]


class Seen(NamedTuple):
    """The state of a server."""

    label: str  # of its weights, "version@session"
    weights: str  # checksums of all tensors
    tokens: tuple[int, ...]  # greedy ones, of the same label

    @property
    def version(self) -> int:
        """The version of its label; -1 before the first publish."""
        number = self.label.partition("@")[0]
        return int(number) if number.isdigit() else -1


class Host:
    """A machine: `jaxrl serve` with one server, behind a link from the learner and one to the
    store."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int, links: dict[str, Link]):
        self.process, self.port, self.links = process, port, links
        self._worked = list[int]()
        self._client = httpx2.Client(
            base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=60.0, trust_env=False
        )

    @property
    def url(self) -> str:
        """Address of the server, through its link."""
        return f"http://127.0.0.1:{self.links['server'].port}"

    def healthy(self) -> bool:
        """Tells whether the server answers that it is ready."""
        try:
            return self._client.get("/health").status_code == 200
        except httpx2.RequestError:
            return False

    def look(self) -> Seen | None:
        """Returns the server's state; None if it fails, or changes meanwhile."""
        try:
            label = self._label()
            weights = self.weights()
            params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
            body = {"token_ids": _PROMPT, "sampling_params": params}
            answer = self._client.post("/inference/v1/generate", json=body).raise_for_status()
            (choice,) = answer.json()["choices"]
            labels = {span["version"] for span in choice.get("weight_versions") or ()}
            self._worked = self.servers()
            same = labels == {label} and self._label() == label
            return Seen(label, weights, tuple(choice["token_ids"])) if same else None
        except (httpx2.RequestError, httpx2.HTTPStatusError):
            return None

    def weights(self) -> str:
        """Returns the checksums of its tensors."""
        answer = self._client.post("/weight_checker", json={"action": "checksum"})
        return answer.raise_for_status().text

    def _label(self) -> str:
        return self._client.get("/weight_info").raise_for_status().json()["weight_version"]

    def agent(self) -> list[int]:
        """Returns the process of its agent, if that runs."""
        found = processes("jaxrl.bridge.store.agent")
        return [process for process in found if parent(process) == self.process.pid]

    def servers(self) -> list[int]:
        """Returns the processes of its server."""
        found = processes("vllm.entrypoints.openai.api_server", str(self.port))
        groups = {group(process) for process in found} - {0}
        return [p for p in processes() if group(p) in groups]

    def worked(self) -> list[int]:
        """Returns the processes of its server once they have given tokens, as long as all live."""
        return self._worked if set(self._worked) <= set(self.servers()) else []

    def kill_server(self) -> None:
        """Kills all processes of the server."""
        for process in self.servers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def parent(process: int) -> int:
    """Returns a process's parent; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def group(process: int) -> int:
    """Returns a process's group; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return os.getpgid(process)
    return 0


@contextmanager
def host(model: Path, *, store: int | None, log: Path) -> Iterator[Host]:
    """Runs a host whose agent reaches the store at a port; without a store it has no links."""
    port = free_port("127.0.0.1", 0)
    command = [*COMMAND, "serve", str(model), "--dtype", "f32", "--port", str(port)]
    command += ["--max_model_len", "64", "--kv_cache_bytes", str(64 << 20)]
    environment = os.environ | {"JAXRL_API_KEY": KEY, "JAXRL_LEASE": str(LEASE)} | _ONE_THREAD
    with ExitStack() as stack:
        links = dict[str, Link]()
        if store is not None:
            for name, target in (("server", port), ("store", store)):
                links[name] = stack.enter_context(Link(target))
            environment["HTTP_PROXY"] = f"http://127.0.0.1:{links['store'].port}"
            environment["http_proxy"] = environment["HTTP_PROXY"]
        output = stack.enter_context(log.with_stem(f"{log.stem}_serve").open("ab"))
        process = stack.enter_context(
            subprocess.Popen(
                [*command, "--log", str(log)], env=environment, stdout=output, stderr=output
            )
        )
        stack.callback(process.terminate)
        yield Host(process, port=port, links=links)


def wait_for(found: list[Host], *, log: Path) -> None:
    """Waits until all servers are ready; raises RuntimeError if one ends."""
    while not all(one.healthy() for one in found):
        if any(one.process.poll() is not None for one in found):
            raise RuntimeError(f"the servers did not start; see {log.parent}")
        time.sleep(1)
