"""`jaxrl serve`, and the servers that a run starts."""

from contextlib import contextmanager

import pytest

from jaxrl.bridge.in_vllm import auth
from jaxrl.bridge.servers import api_key
from jaxrl.bridge.servers.launch import ServerFailedError
from jaxrl.builders import sampler, servers
from jaxrl.builders.layout import make_layout
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.commands.serve import command
from jaxrl.config import toml_file
from jaxrl.config.toml_file import ConfigError
from jaxrl.core.precision import PRESETS
from jaxrl.huggingface.checkpoint import Checkpoint
from tests import tiny
from tests.run_config import run_config


def opened(config, directory):
    """The sampler of a run, without weights."""
    return sampler.open_sampler(
        config.sampler,
        WeightRoute(tiny.model(), {}, 0, PRESETS["fp32"], Checkpoint("m")),
        layout=make_layout(config.mesh),
        needs=sampler.SamplerNeeds(config.longest_sequence, max_batch=1),
        directory=directory,
        note=print,
    )


def test_replicas_need_a_port():
    with pytest.raises(ConfigError, match="for example port = 8000"):
        toml_file.validate(command.ServeConfig, {"replicas": 2})


def test_restarted_server_keeps_its_address_and_key(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found: list[tuple[int, str]] = []

    class Server:
        url = "http://127.0.0.1:8000"

        def wait(self, progress):
            pass

        def check(self) -> None:
            api_key.key_file().unlink(missing_ok=True)
            raise KeyboardInterrupt if len(found) == 2 else ServerFailedError("killed")

    @contextmanager
    def start(*_, port: int, api_key: str, **__):
        found.append((port, api_key))
        yield servers.StartingServer(Server(), "model", tmp_path / "log", lambda line: None)

    monkeypatch.setattr(command, "starting_server", start)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["model"]) == 0
    assert found[0] == found[1]
    port, key = found[0]
    assert port > 0
    assert len(key) >= 32
    shown = capsys.readouterr()
    assert shown.out == "http://127.0.0.1:8000\n"
    assert "failed; restarting in 0 s: killed" in shown.err


def test_reachable_server_needs_a_given_key(monkeypatch, tmp_path):
    """Nothing is started and no key is made: the learner could not find it."""
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tiny.write_checkpoint(tmp_path / "model")
    log, python = tmp_path / "log", tmp_path / "python"
    python.touch()
    arguments = ["--host", "0.0.0.0", "--log", str(log), "--python", str(python)]
    with pytest.raises(ValueError, match=r"host = '0\.0\.0\.0' needs a key.* set JAXRL_API_KEY"):
        command.main([str(tmp_path / "model"), *arguments])
    assert not log.exists()
    assert not api_key.key_file().exists()


class StartedError(Exception):
    pass


def test_runs_server_gets_a_secret_key(monkeypatch, tmp_path):
    """Other users of the machine can reach loopback as well."""
    keys: list[str | None] = []

    def start(*_, api_key: str | None, **__):
        keys.append(api_key)
        raise StartedError

    monkeypatch.setattr(servers, "starting_server", start)
    config = run_config(tmp_path, sampler__name="vllm")

    def begin() -> None:
        with pytest.raises(StartedError), opened(config, tmp_path):
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


def test_run_finds_the_servers_key(monkeypatch, tmp_path):
    """Without the user doing anything, for samples and for weights."""
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made, used = api_key.server_key("127.0.0.1"), []

    class Control:
        url = "http://127.0.0.1:8000"

        def __init__(self, *_, api_key, **__):
            used.append(auth.headers(api_key))

        def is_stock(self):
            return False

    def client(*_, headers, **__):
        used.append(headers)
        raise StartedError

    monkeypatch.setattr(sampler, "VllmServer", Control)
    monkeypatch.setattr(sampler, "VllmSampler", client)
    config = run_config(tmp_path, sampler__name="vllm", sampler__url="http://127.0.0.1:8000")
    with pytest.raises(StartedError), opened(config, tmp_path):
        pass
    assert used == [{"Authorization": f"Bearer {made}"}] * 2
