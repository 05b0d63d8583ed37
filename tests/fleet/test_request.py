"""What a fleet asks for, what a cluster lacks, and what a dead host means."""

from unittest import mock

import pytest

from jaxrl.config import toml_file
from jaxrl.config.fleet import FleetConfig, read_resources
from jaxrl.config.training import Config
from jaxrl.fleet import request, servers
from jaxrl.fleet.events import summary
from jaxrl.fleet.launch import _Gang
from jaxrl.fleet.wanted import Wanted
from tests.run_config import run_config


def lacking(nodes, **keys):
    return request.lacking(request.requests(FleetConfig(**keys)), nodes)


def test_each_scarce_resource_is_named_with_both_numbers():
    keys = {"learners": 2, "learner_resources": ("GPU=8", "CPU=4"), "workers": 4}
    assert lacking([{"CPU": 12, "GPU": 8}] * 2, **keys) == []
    assert lacking([{"CPU": 6, "GPU": 8}, {"CPU": 5}], **keys) == [
        "GPU: 16 asked for (2 learner hosts x 8), and the cluster has 8",
        "CPU: 12 asked for (2 learner hosts x 4 + 4 workers x 1), and the cluster has 11",
    ]


def test_enough_in_all_but_not_on_one_node_is_named():
    (line,) = lacking([{"GPU": 4.0, "CPU": 9.0}] * 2, learner_resources=("GPU=8",))
    assert "a learner host asks for GPU 8, and no node has as much" in line
    assert "GPU 4, CPU 9" in line


@pytest.mark.parametrize("texts", [[], ["GPU"], ["GPU=x"], ["GPU=0"], ["=1"], ["CPU=1", "CPU=2"]])
def test_resources_in_another_form_are_refused(texts):
    with pytest.raises(ValueError, match=r"empty|NAME=NUMBER|twice"):
        read_resources(texts)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"fleet.servers": 1}, "set sampler.name = 'vllm'"),
        ({"fleet.learners": 2, "fleet.learner_slice": "v6e:4x4"}, "leave fleet.learners out"),
        ({"fleet.learner_slice": "v6e-16"}, "expected GENERATION:TOPOLOGY"),
        ({"hosts.coordinator": "auto"}, "leave hosts.coordinator out"),
        ({"run_dir": "s3://bucket/run"}, "run_dir = 's3://bucket/run' and fleet.engine"),
    ],
)
def test_contradictions_name_the_fix(tmp_path, keys, text):
    with pytest.raises(toml_file.ConfigError, match=text):
        run_config(tmp_path, **{"fleet.engine": "ray"} | keys)
    assert isinstance(run_config(tmp_path, **{"fleet.workers": 3}), Config)


@pytest.mark.parametrize(
    ("ends", "stopped", "died", "status"),
    [
        ({0: 0, 1: 0}, (), None, 0),
        ({0: 1, 1: 1}, (), None, 1),  # an error that the run reports is not retried
        ({0: 0, 1: 3}, (), None, 3),
        ({0: 1, 1: -9}, (), "learner host 1 died (killed by signal 9)", 1),
        ({0: "lost", 1: 1}, (), "learner host 0 died (lost)", 1),
        ({0: 1, 1: "lost"}, (1,), None, 1),  # the fleet itself ended it
    ],
)
def test_only_deaths_count_as_deaths(ends, stopped, died, status):
    gang = _Gang(ends, frozenset(stopped))
    assert gang.died() == died
    assert gang.status() == status


def test_summary_counts_deaths_and_names_what_is_down():
    entries = [{"part": "fleet", "event": "asked", "text": "2 servers"}]
    assert summary([]) is None
    assert summary(entries) == "fleet: 2 servers; 0 deaths"
    entries += [{"part": f"server {i}", "event": "died"} for i in (0, 1)]
    entries += [{"part": "server 1", "event": "started"}]
    assert summary(entries) == "fleet: 2 servers; 2 deaths; down: server 0, server 1"
    entries += [{"part": "server 1", "event": "ready"}]
    entries += [{"part": "fleet", "event": "resized", "workers": 3}]
    text = "fleet: 2 servers; 3 workers asked for since; 2 deaths; down: server 0"
    assert summary(entries) == text
    entries += [{"part": "fleet", "event": "resized", "servers": number} for number in (2, 1)]
    entries += [{"part": "server 0", "event": "removed"}]
    assert summary(entries) == "fleet: 2 servers; 1 servers, 3 workers asked for since; 2 deaths"


def test_a_learner_without_servers_is_told_from_one_with_an_error(tmp_path, monkeypatch):
    config, clock = run_config(tmp_path, **{"fleet.engine": "ray"}), [1000.0]
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(servers.time, "monotonic", lambda: clock[0])
    ray = mock.MagicMock()
    ray.exceptions.RayError = ConnectionError
    monkeypatch.setattr(servers, "import_ray", lambda: ray)
    keys = {"directory": tmp_path, "wanted": Wanted(tmp_path, "servers"), "events": Events()}
    fleet = servers.Servers(config, [mock.MagicMock()] * 2, **keys)
    first, second = fleet._servers
    for one in (first, second):
        one.place, one.ready = servers.Place("node", "10.0.0.1", 0, 1), True
        one.actor = mock.MagicMock()
    assert not fleet.lost()
    fleet._rest(first, "killed")
    assert not fleet.lost()  # the other one serves
    fleet._rest(second, "killed")
    assert fleet.lost()
    fleet._greet(second)
    clock[0] += 30
    assert fleet.lost()  # the learner may not have noticed that it is back
    clock[0] += 40
    assert not fleet.lost()
    assert not servers.Servers(config, [], **keys).lost()
    ray.get.side_effect = ConnectionError  # it is dead, and Ray has not told so yet
    assert fleet.lost()
    assert second.place is None  # it gets a place at the next start


class Events:
    """Forgets what happens."""

    def write(self, *args, **fields):
        pass

    note = write
