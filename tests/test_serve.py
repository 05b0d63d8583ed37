"""`jaxrl serve` with several servers, which are made by hand here."""

from contextlib import contextmanager

import pytest

from jaxrl import config_file
from jaxrl.commands import serve
from jaxrl.config_file import ConfigError


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
        config_file.validate(serve.ServeConfig, {"replicas": 2})
