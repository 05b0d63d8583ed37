"""The numbers of parts follow what users ask for; a stand-in takes Ray's place."""

from types import SimpleNamespace
from unittest import mock

import pytest

from jaxrl.cli import main
from jaxrl.config import toml_file
from jaxrl.config.fleet import FleetConfig
from jaxrl.fleet import placement, pool as module
from jaxrl.fleet.events import Events
from jaxrl.fleet.placement import Slot
from jaxrl.fleet.wanted import Wanted, ask, wanted_file
from tests.run_config import run_config


class Ray:
    """Counts actors and placement groups; `places` tells if a new group is ready."""

    def __init__(self):
        self.actors, self.groups, self.places = [], [], True
        self.util = SimpleNamespace(
            placement_group=self._reserve, remove_placement_group=self.groups.remove
        )

    def _reserve(self, bundles):
        self.groups.append(mock.MagicMock(bundles=bundles))
        return self.groups[-1]

    def remote(self, kind):
        return SimpleNamespace(options=lambda **given: SimpleNamespace(remote=self._start(given)))

    def _start(self, given):
        def start(*arguments, **more):
            assert given["name"] not in self.actors
            self.actors.append(given["name"])
            return given["name"]

        return start

    def kill(self, actor, no_restart=True):
        if no_restart:
            self.actors.remove(actor)

    def wait(self, answers, timeout):
        return (answers, []) if self.places else ([], answers)


@pytest.fixture
def ray(monkeypatch):
    pytest.importorskip("ray")
    ray = Ray()
    for each in (module, placement):
        monkeypatch.setattr(each, "import_ray", lambda: ray)
    monkeypatch.setattr(module, "free", lambda: {"CPU": 0.5})
    monkeypatch.setattr(
        "ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy", mock.MagicMock()
    )
    return ray


def names(count):
    return [f"worker-{i}" for i in range(count)]


def test_pool_grows_and_shrinks_and_keeps_its_own_slots(ray, tmp_path):
    wanted_file(tmp_path, "workers").write_text("9")  # of an earlier fleet
    events, config = mock.MagicMock(), FleetConfig(worker_resources=("CPU=2",), wait=1e-9)
    slots = [Slot(mock.MagicMock(), i, {"CPU": 2.0}) for i in range(2)]
    keys = {"directory": tmp_path, "wanted": Wanted(tmp_path, "workers"), "events": events}
    pool = module.Pool(config, slots, **keys)
    for asked, own in ((2, 0), (4, 2), (3, 1), (1, 0), (3, 1)):
        ask(tmp_path, "workers", asked)
        pool.look()
        pool.look()
        assert (ray.actors, len(ray.groups)) == (names(asked), own)
    assert all(group.bundles == [{"CPU": 2.0}] for group in ray.groups)
    ray.places = False
    ask(tmp_path, "workers", 4)
    for _ in range(3):
        pool.look()
    waiting = [call.args[0] for call in events.note.call_args_list if "waits for" in str(call)]
    assert waiting == [
        "worker 3 waits for CPU=2; free are: CPU 0.5. It starts as soon as a node has that much"
    ]
    assert ray.groups[-1].ready.call_count == 1  # each starts a task
    wanted_file(tmp_path, "workers").write_text("many")
    pool.look()
    wanted_file(tmp_path, "workers").unlink()
    wanted_file(tmp_path, "workers").mkdir()  # cannot be read
    pool.look()
    assert len(pool) == 4
    pool.close()
    assert ray.actors == ray.groups == []


def test_command_asks_only_a_run_with_workers(tmp_path, capsys):
    for keys, status in (({}, 1), ({"fleet.engine": "ray", "fleet.workers": 2}, 0)):
        config = run_config(tmp_path, **keys)
        (tmp_path / "config.toml").write_text(toml_file.dumps(config))
        assert main(["fleet", str(tmp_path), "--workers", "5"]) == status
    assert "fleet.engine = 'none' and fleet.workers = 0" in capsys.readouterr().err
    assert wanted_file(tmp_path, "workers").read_text() == "5\n"
    assert main(["fleet", str(tmp_path), "--workers", "0"]) == 1
    (tmp_path / "config.toml").write_text("[train]\nsteps = 2\n")  # of a supervised run
    assert main(["fleet", str(tmp_path), "--workers", "5"]) == 1
    assert "has no table [fleet]" in capsys.readouterr().err


def test_command_says_that_a_fleet_has_ended(tmp_path, capsys):
    config = run_config(tmp_path, **{"fleet.engine": "ray", "fleet.workers": 2})
    (tmp_path / "config.toml").write_text(toml_file.dumps(config))
    words = ["fleet", str(tmp_path), "--workers", "5"]
    with Events(tmp_path, print) as events:
        events.begin("2 workers")
        assert main(words) == 0
        with pytest.raises(ValueError, match="another command trains"):
            Events(tmp_path, print)
    wanted_file(tmp_path, "workers").unlink()
    assert main(words) == 1
    assert "was killed, so it has no parts" in capsys.readouterr().err
    with Events(tmp_path, print) as events:
        events.begin("2 workers")
        events.write("fleet", "ended", status=3)
    assert main(words) == 1
    assert "ended with status 3" in capsys.readouterr().err
    assert not wanted_file(tmp_path, "workers").exists()
    with Events(tmp_path, print) as events:
        events.write("fleet", "asked", host="another")  # whose lock this one may not see
    assert main(words) == 0
