"""`jaxrl serve`, and the servers that a run starts."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxrl.bridge.servers.launch import ServerFailedError
from jaxrl.builders import sampler, servers
from jaxrl.builders.layout import make_layout
from jaxrl.builders.weight_sync import Weights
from jaxrl.commands.serve import command
from jaxrl.config import toml_file
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config
from jaxrl.core.precision import PRESETS
from tests import tiny


def test_replicas_need_a_port():
    with pytest.raises(ConfigError, match="for example port = 8000"):
        toml_file.validate(command.ServeConfig, {"replicas": 2})


def test_restarted_server_keeps_its_port(monkeypatch, capsys):
    ports: list[int] = []

    class Server:
        url = "http://127.0.0.1:8000"

        def check(self) -> None:
            raise KeyboardInterrupt if len(ports) == 2 else ServerFailedError("killed")

    @contextmanager
    def start(*_, address: servers.Address, **__):
        ports.append(address.port)
        yield Server()

    monkeypatch.setattr(servers, "started_server", start)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["model"]) == 0
    assert ports[0] == ports[1] > 0
    shown = capsys.readouterr()
    assert shown.out == "http://127.0.0.1:8000\n"
    assert "failed; restarting in 0 s: killed" in shown.err


class StartedError(Exception):
    pass


def test_server_of_a_run_gets_a_secret_key(monkeypatch, tmp_path):
    """Other users of the machine can reach loopback as well."""
    keys: list[str | None] = []

    def start(*_, address: servers.Address, **__):
        keys.append(address.api_key)
        raise StartedError

    monkeypatch.setattr(servers, "started_server", start)
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
            sampler.open_sampler(
                config.sampler,
                Weights(tiny.model(), {}, 0, PRESETS["fp32"], Path("m")),
                layout=make_layout(config.mesh),
                needs=sampler.SamplerNeeds(config.longest_sequence, max_batch=1),
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
