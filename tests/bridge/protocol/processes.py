"""Hosts with an agent, servers whose vLLM is simulated, and the network to them."""

import asyncio
import contextlib
import json
import os
import selectors
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.in_vllm.lease import Lease
from jaxrl.bridge.in_vllm.relay import Relay
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.store import agent, version
from jaxrl.bridge.store.agent import StoreAgent
from tests.bridge.protocol.vllm_modules import engine_class
from tests.bridge.protocol.world import KilledError, World

ENGINE = engine_class()
RESTART = 0.5  # seconds until a killed agent is back
_WRAPPED = "', please check the stack trace above for the root cause"


class _Selector(selectors.SelectSelector):
    """Waits for no file: the clock steps to the next timer."""

    world: World

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.world.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    """A loop with the world's clock."""

    def __init__(self, world: World) -> None:
        self._selector_of_world = _Selector()
        self._selector_of_world.world = self._world = world
        super().__init__(self._selector_of_world)

    def time(self) -> float:
        return self._world.now

    def due(self) -> bool:
        """Tells whether a timer is due."""
        return any(timer.when() <= self._world.now for timer in self._scheduled)


class Request(NamedTuple):
    """A request to a server."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Host:
    """A machine with an agent, which is restarted if it is killed."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world, self.directory = world, directory
        self.root = directory / relay.PAYLOADS
        self.root.mkdir(parents=True, mode=0o700)
        self._back = 0.0
        self.later = dict[Background, Callable[[], Any]]()
        self.agent = StoreAgent(self.root, key=None)

    def kill(self) -> None:
        """Kills the agent; its slots stay."""
        self._back = self.world.now + RESTART
        self.later.clear()
        self.agent = StoreAgent(self.root, key=None)

    def revive(self) -> None:
        """Has the agent back."""
        self._back = 0.0

    def answer(self, line: bytes) -> bytes:
        """Answers a relay; an empty line if the agent is killed meanwhile.

        Raises:
          ConnectionRefusedError: if it is not back yet.
        """
        if self.world.now < self._back:
            raise ConnectionRefusedError(str(self.directory))
        Background.host = self
        return self._run(lambda: json.dumps(self.agent.answer(json.loads(line))).encode())

    def settle(self) -> None:
        """Lets fetches go on once the store answers."""
        while self.later and self.world.now >= max(self.world.down_until, self._back):
            self._run(self.later.pop(next(iter(self.later))))

    def _run(self, call: Callable[[], bytes]) -> bytes:
        """Calls a function of the agent; returns nothing if the agent is killed meanwhile."""
        try:
            with self.world.acting("agent"):
                return call()
        except KilledError:
            self.kill()
            return b""
        finally:
            self._set_times()

    def _set_times(self) -> None:
        """Gives the files that have just changed the host's time, which may have stepped."""
        for path in self.root.rglob("*"):
            if path.stat().st_mtime > 1.5e9:
                os.utime(path, times=(self.world.now + self.world.wall,) * 2)

    def check(self) -> None:
        """Checks that complete slots hold exactly the words of the version that they name."""
        for path in self.root.glob(f"*/slot-*/{manifest.FILE}"):
            found = manifest.read(path.parent)
            expected = self.world.published[found.learner.session, found.version]
            for entry, data in payload.open_tensors(path.parent, found.entries):
                assert data.tobytes() == expected[entry.name], path


class Background:
    """Stands for `Newest`: fetches at once, or, while the store is down, later."""

    host: Host  # whose agent runs
    waiting = False

    def submit(self, _: Any, run: Callable[[], Any]) -> Future[Any]:
        """Returns the outcome.

        Raises:
          _SilentError: if the store does not answer.
        """
        host, found = self.host, Future[Any]()
        host.later.pop(self, None)
        if host.world.down_until > host.world.now:
            host.later[self] = lambda: str(_outcome(run)).encode()
            host.world.sleep(agent._PATIENCE)
            raise agent._SilentError("the store does not answer")
        outcome = _outcome(run)
        if isinstance(outcome, Exception):
            found.set_exception(outcome)
        else:
            found.set_result(outcome)
        return found


def _outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return error


def check_target(slot: Path) -> None:
    """Checks that an agent does not fill the slot that servers read: the one with the newest
    version, by number."""
    held = dict[int, list[Path]]()
    for record in slot.parent.glob("slot-*/.stored"):
        with contextlib.suppress(ManifestError):
            content = version.parse_version(record.read_bytes())
            held.setdefault(content.version, []).append(record.parent)
    if len(held) > 1:
        assert slot not in held[max(held)], f"{slot} is in service"


class Model:
    """vLLM's model: takes tensors one by one."""

    def __init__(self, world: World, tensors: dict[str, bytes]) -> None:
        self.held, self._world = tensors, world

    def modules(self) -> list[Any]:
        """Has no layers that the engine must treat."""
        return []

    def load_weights(self, tensors: Any) -> None:
        """Replaces tensors."""
        for name, tensor in tensors:
            kind = self._world.strike("load")
            if kind == "kill":
                raise KilledError("server")
            if kind == "fail":
                raise OSError("the memory went away")
            self.held[name] = tensor.numpy().tobytes()


class Server:
    """A vLLM server of a host behind the bridge's middleware."""

    def __init__(self, host: Host, *, port: int, checkpoint: Path) -> None:
        self.host, self.port, self.url = host, port, f"http://{host.directory.name}:{port}"
        self._checkpoint = checkpoint
        self._loop: Any = None
        self.late: list[Request] = []
        self.start()

    def start(self) -> None:
        """Begins with the checkpoint's weights, which have no version."""
        self.stop()
        os.environ[relay.DIRECTORY] = str(self.host.directory)
        world, initial = self.host.world, self.host.world.published["", 0]
        config = SimpleNamespace(
            model=str(self._checkpoint),
            dtype="torch.float16",
            quantization=None,
            logprobs_mode="processed_logprobs",
            hf_config=SimpleNamespace(tie_word_embeddings=False),
            hf_text_config=SimpleNamespace(num_hidden_layers=1),
        )
        self.model = Model(world, dict(initial))
        self.engine = ENGINE(self.model, config)
        self.label, self.paused, self.session, self.busy = "default", False, False, False
        self.app = Lease(Relay(self._vllm))
        self._loop = _Loop(world)
        self.alive = True

    def stop(self) -> None:
        """Is killed."""
        self.alive = False
        if self._loop is not None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with contextlib.suppress(KilledError):
                self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()
            self._loop = None

    def owner(self) -> str | None:
        """Returns the name of the learner that the server belongs to."""
        held = self.engine._ownership._learner
        return None if held is None else held.name

    def settle(self) -> None:
        """Lets timers run that are due, such as a lease's."""
        if self.alive and self._loop.due():
            self._loop.run_until_complete(asyncio.sleep(1e-6))  # long enough for what they begin
        self.check()

    def check(self) -> None:
        """Checks that a server which samples holds the version that its tokens are labelled with.

        The lease may find something else in no moment: vLLM samples whenever it is not paused, but
        not while it loads.
        """
        if not self.alive or self.paused or self.busy:
            return
        number, _, session = self.label.partition("@")
        key = ("", 0) if self.label == "default" else (session, int(number))
        expected = self.host.world.published[key]
        wrong = [name for name, data in expected.items() if self.model.held[name] != data]
        assert not wrong, f"{self.url} samples {self.label} with other weights in {wrong}"

    def answer(self, request: Request) -> tuple[int, bytes]:
        """Returns status and body."""
        self.busy = True
        os.environ[relay.DIRECTORY] = str(self.host.directory)
        try:
            return self._loop.run_until_complete(self._answer(request))
        finally:
            self.busy = False

    async def _answer(self, request: Request) -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "headers": request.headers,
            "server": (self.host.directory.name, self.port),
        }
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    async def _vllm(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        status, answer = 200, dict[str, Any]()
        try:
            answer = self._route(scope["path"], json.loads(body or b"{}"))
        except Exception as error:
            status, answer = 500, {"error": {"message": f"{error}{_WRAPPED}"}}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _route(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As vLLM's routes and its worker."""
        match path:
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/init_weight_transfer_engine":
                self.engine.init_transfer_engine(self.engine.parse_init_info(body["init_info"]))
            case "/shutdown_weight_transfer_engine":
                if self.session:
                    raise RuntimeError("during a weight update")
                self.engine.shutdown()
            case "/start_weight_update":
                if self.session:
                    raise RuntimeError("already active")
                self.engine.start_weight_update()
                self.session = True
            case "/update_weights":
                self._needs_session()
                try:
                    info = self.engine.parse_update_info(body["update_info"])
                    self.engine.receive_weights(info)
                except BaseException:
                    self.session = False
                    raise
            case "/finish_weight_update":
                self._needs_session()
                self.engine.finish_weight_update()
                self.session = False
                if self.host.world.strike("label") == "kill":
                    raise KilledError("server")
                self.label = body["weight_version"]
            case "/weight_info":
                return {"weight_version": self.label}
            case "/version":
                return {"version": "0.32.0"}
        return {}

    def _needs_session(self) -> None:
        if not self.session:
            raise RuntimeError("start_weight_update must be called before")


def write_checkpoint(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Writes what servers start with."""
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


def connections(hosts: list[Host]) -> Callable[..., Any]:
    """Returns what stands for `asyncio.open_unix_connection`: the sockets of the hosts' agents."""

    class Connection:
        def __init__(self, path: str) -> None:
            (self._host,) = (host for host in hosts if host.directory == Path(path).parent)
            if self._host.world.now < self._host._back:
                raise ConnectionRefusedError(path)
            self._line = b""

        def write(self, line: bytes) -> None:
            self._line = line

        async def readline(self) -> bytes:
            return self._host.answer(self._line)

        def close(self) -> None:
            """Closes nothing."""

    async def connect(path: str) -> tuple[Connection, Connection]:
        found = Connection(path)
        return found, found

    return connect


def disk(world: World) -> Iterator[tuple[str, Any]]:
    """Yields methods of `Path` before which an agent may be killed, or its memory be full."""

    def striking(method: Any) -> Any:
        def call(self: Path, *args: Any, **options: Any) -> Any:
            if world.actor == "agent":
                kind = world.strike("disk")
                if kind == "kill":
                    raise KilledError("agent")
                if kind == "fail":
                    raise OSError(28, "No space left on device")
            return method(self, *args, **options)

        return call

    for name in ("unlink", "replace", "write_bytes", "mkdir", "touch"):
        yield name, striking(getattr(Path, name))
