"""`jaxrl serve` with several servers, which are made by hand here."""

from contextlib import contextmanager

import pytest

from jaxrl import parts, samplers
from jaxrl.commands import serve
from jaxrl.config import toml_file
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config
from jaxrl.precision import PRESETS
from tests import tiny


class Server:
    def __init__(self, number: int, starts: list[int]) -> None:
        self.url, self.ended = f"http://127.0.0.1:{8000 + number}", False
        starts.append(number)

    def check(self) -> None:
        if self.ended:
            raise OSError("killed")


def test_a_replica_that_ends_is_started_again(capsys):
    starts: list[int] = []
    stopped: list[int] = []
    servers: dict[int, Server] = {}

    @contextmanager
    def start(number: int):
        servers[number] = Server(number, starts)
        yield servers[number]
        stopped.append(number)

    notes: list[str] = []
    with serve.replicas(start, count=2, failure=OSError, note=notes.append) as check:
        check()
        assert starts == [0, 1]
        servers[1].ended = True
        check()
        check()
        assert (starts, stopped) == ([0, 1, 1], [1])
    assert sorted(stopped) == [0, 1, 1]
    assert notes == ["http://127.0.0.1:8001 has ended and is started again: killed"]
    assert capsys.readouterr().out == "http://127.0.0.1:8000\nhttp://127.0.0.1:8001\n"
    with serve.replicas(start, count=1, failure=OSError, note=notes.append) as check:
        servers[0].ended = True
        with pytest.raises(OSError, match="killed"):
            check()


def test_replicas_need_a_port():
    with pytest.raises(ConfigError, match="such as port = 8000"):
        toml_file.validate(serve.ServeConfig, {"replicas": 2})


class StartedError(Exception):
    pass


def test_a_server_of_a_runs_own_has_a_key_that_nobody_knows(monkeypatch, tmp_path):
    """Others with an account on the machine can reach loopback, too."""
    keys: list[str | None] = []

    def start(*_, key: str | None = None, **__):
        keys.append(key)
        raise StartedError

    monkeypatch.setattr(samplers, "started_server", start)
    asked = {
        "model.path": "m",
        "data.path": "d",
        "reward.path": "exact_match",
        "sampler.name": "vllm",
    }
    config = toml_file.load(Config, overrides=list(asked.items()))

    def begin() -> None:
        with (
            pytest.raises(StartedError),
            samplers.open_sampler(
                config,
                tiny.model(),
                params={},
                version=0,
                policy=PRESETS["fp32"],
                layout=parts.make_layout(config.mesh),
                directory=tmp_path,
                note=print,
            ),
        ):
            pass

    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    begin()
    begin()
    assert None not in keys
    assert len(set(keys)) == 2
    assert all(len(key) >= 32 for key in keys if key)
    monkeypatch.setenv("JAXRL_API_KEY", "mine")
    begin()
    assert keys[-1] == "mine"
