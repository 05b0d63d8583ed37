"""Servers that come and go while the learner runs; a stand-in takes Ray's place."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest

from jaxrl.fleet import child, placement, servers as module
from jaxrl.fleet.addresses import read_addresses
from jaxrl.fleet.child import Child, Place, placed
from jaxrl.fleet.placement import Slot
from jaxrl.fleet.server import open_requests
from jaxrl.fleet.wanted import Wanted, ask
from tests import tiny
from tests.run_config import run_config

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="m"}} {}.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} {}.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 7.0
"""


class Actor:
    """A server's actor. Its answers are calls, some of which have a result."""

    ports = itertools.count(1)

    def __init__(self):
        self.answers, self.port = {}, next(self.ports)
        for name in ("place", "run", "spoken", "read"):
            setattr(self, name, SimpleNamespace(remote=self._method(name)))

    def _method(self, name):
        def call(*arguments):
            self.answers[name] = SimpleNamespace(result=None)
            if name == "place":
                self.answers[name].result = Place("here", "10.0.0.1", 0, self.port)
            return self.answers[name]

        return call


class Ray:
    """Starts actors, and knows which answers have a result."""

    exceptions = SimpleNamespace(RayError=RuntimeError, RayActorError=RuntimeError)

    def __init__(self):
        self.actors, self.groups = [], []
        self.util = SimpleNamespace(
            placement_group=self._reserve, remove_placement_group=self.groups.remove
        )

    def _reserve(self, bundles, bundle_label_selector):
        self.groups.append(mock.MagicMock(bundles=bundles, nodes=bundle_label_selector))
        return self.groups[-1]

    def remote(self, kind):
        assert kind is Child
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, *arguments):
        self.actors.append(Actor())
        return self.actors[-1]

    def kill(self, actor):
        self.actors.remove(actor)

    def wait(self, answers, num_returns=1, timeout=0):
        ready = [one for one in answers if one.result is not None]
        return ready, [one for one in answers if one.result is None]

    def get(self, answer):
        if isinstance(answer.result, Exception):
            raise answer.result
        return answer.result


@pytest.fixture
def ray(monkeypatch):
    pytest.importorskip("ray")
    ray = Ray()
    for each in (module, placement, child):
        monkeypatch.setattr(each, "import_ray", lambda: ray)
    monkeypatch.setattr(module, "free", lambda: {"GPU": 1.0})
    monkeypatch.setattr(
        "ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy", mock.MagicMock()
    )
    return ray


class Signals:
    """Waits no longer; whoever is waited for is ready at once."""

    def wait(self, answers, seconds):
        for one in answers:
            one.result = one.result or True
        return True

    def sleep(self, seconds):
        pass


def test_actor_on_a_node_that_has_just_died_is_started_again(ray):
    started, start = [], ray._start

    def start_on_nodes(*arguments):
        started.append(start(*arguments))
        if len(started) in (2, 3):
            died = SimpleNamespace(result=RuntimeError("its node has died"))
            started[-1].place = SimpleNamespace(remote=lambda: died)
        return started[-1]

    ray._start = start_on_nodes
    slots = [Slot(mock.MagicMock(), i, {"CPU": 1.0}) for i in range(2)]
    found = placed(slots, "directory", {}, seconds=60, signals=Signals())
    assert [actor for actor, _ in found] == ray.actors == [started[0], started[3]]
    assert [place.port for _, place in found] == [started[0].port, started[3].port]


def servers(directory, events, **changes):
    """Makes the servers of a fleet: one, in a slot with GPU=2."""
    tiny.write_checkpoint(directory / "model")
    keys = {"fleet.engine": "ray", "fleet.servers": 1, "sampler.name": "vllm"}
    keys |= {"run_dir": directory, "fleet.server_resources": "GPU=2"}
    return module.Servers(
        run_config(directory, **keys | changes),
        [Slot(mock.MagicMock(), 0, {"GPU": 2.0})],
        directory=directory,
        wanted=Wanted(directory, "servers"),
        events=events,
    )


def test_servers_of_a_given_store_may_be_on_any_node(ray, tmp_path):
    events = mock.MagicMock()
    fleet = servers(tmp_path, events, **{"sampler.store": "s3://bucket/weights"})
    learner = Place("here", "10.0.0.1", 0, 0)
    route = fleet.open(learner, variables={}, signals=Signals())
    assert route == ["--sampler.url", f"http://10.0.0.1:{ray.actors[0].port}"]
    assert "sampler.store = 's3://bucket/weights'" in events.note.call_args.args[0]
    ask(tmp_path, "servers", 2)
    fleet.look([])
    assert [group.nodes for group in ray.groups] == [[{}]]
    fleet.close()


def test_servers_are_added_ready_and_removed_idle(ray, tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    events = mock.MagicMock()
    fleet = servers(tmp_path, events)

    def look():
        """Looks as often as there is something new, and a second later."""
        for _ in range(4):
            fleet.look(ray.wait(fleet.answers())[0])
        clock[0] += 1

    def addresses():
        return [[url.rpartition(":")[2] for url in urls] for urls in read_addresses(tmp_path)]

    learner = Place("here", "10.0.0.1", 0, 0)
    route = fleet.open(learner, variables={}, signals=Signals())
    first = str(ray.actors[0].port)
    assert route[-1].endswith(f":{first}")
    assert addresses() == [[first], []]

    ask(tmp_path, "servers", 2)
    look()
    (group,), (_, added) = ray.groups, ray.actors
    assert (group.bundles, group.nodes) == ([{"GPU": 2.0}], [{"ray.io/node-id": "here"}])
    assert addresses() == [[first], []]  # it is not ready
    added.answers["spoken"].result = True
    look()
    second = str(added.port)
    assert addresses() == [[first, second], []]

    ask(tmp_path, "servers", 1)
    look()
    assert addresses() == [[first], [second]]
    for running, waiting in ((3, 0), (0, 1)):  # which it finishes, however long they take
        added.answers["read"].result = METRICS.format(running, waiting)
        clock[0] += 100
        look()
    for _ in range(6):
        added.answers["read"].result = METRICS.format(0, 0)
        look()
    assert addresses() == [[first], []]
    assert (len(ray.actors), ray.groups) == (1, [])
    written = [call.args for call in events.write.call_args_list if call.args[0] == "server 1"]
    assert [event for _, event in written] == ["started", "ready", "leaving", "removed"]

    # One that has no place yet is no part of a learner's new start, and is added after it.
    ask(tmp_path, "servers", 3)
    look()
    assert len(ray.actors) == 3
    assert fleet.open(learner, variables={}, signals=Signals())[-1].endswith(f":{first}")
    assert len(ray.actors) == 1
    look()
    assert len(ray.actors) == 3
    fleet.close()
    assert ray.actors == []


def test_requests_are_running_and_waiting_ones():
    assert open_requests(METRICS.format(3, 2)) == 5
    assert open_requests("") == 0
