"""Rewards and whole groups in workers, on a real Ray of three nodes."""

import itertools
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("ray")
import ray
from ray.cluster_utils import Cluster

from jaxrl.core.batch import to_json
from jaxrl.environments.rewards.score import load_rewards, score
from jaxrl.fleet.engine import connect
from jaxrl.fleet.membership import Membership
from jaxrl.fleet.rewards import load_remote_rewards
from jaxrl.fleet.worker import Worker
from jaxrl.fleet.workers import Workers, find_workers, worker_name
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import collect
from jaxrl.training.rollouts.stream import Stream
from tests.fleet.conftest import started
from tests.fleet.served_groups import open_source, reply, write_material

pytestmark = [
    # Ray forks, while jax may run in this process already; the child starts a program at once.
    pytest.mark.filterwarnings("default::ResourceWarning", "ignore:os.fork:RuntimeWarning")
]

REWARDS = """
import os, time
from jaxrl.environments import batched

def length(text, row):
    if text == "raise":
        raise KeyError(row["answer"])
    if text == "slow":
        time.sleep(60)
    if text == "nan":
        return float("nan")
    return len(text) / 7 + row["answer"]

async def later(text, row):
    return len(text)

@batched
def rank(texts, rows):
    return [sorted(texts).index(text) for text in texts]

def deadly(text, row):
    if text == "die":
        os._exit(1)
    return len(text)

def costly(text, row):
    began = time.monotonic()
    time.sleep(.2)
    with open(row["log"], "a") as log:
        log.write(f"{began} {time.monotonic()}\\n")
    return 1.0
"""


@pytest.fixture(scope="module")
def cluster(patient_ray: None) -> Iterator[Cluster]:
    found = started(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 1}))
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def workers(cluster, tmp_path_factory) -> Iterator[Workers]:
    """Two workers, on nodes of their own."""
    directory = tmp_path_factory.mktemp("workers")
    (directory / "rewards.py").write_text(REWARDS)
    for _ in range(2):
        started(lambda: cluster.add_node(num_cpus=1, resources={"worker": 1}))
    try:
        found = connect(namespace="test", address=cluster.address)
        made = [
            ray.remote(Worker)
            .options(name=worker_name(i), max_restarts=-1, resources={"worker": 1})
            .remote(os.getcwd(), [], processors=1)
            for i in range(2)
        ]
        used = find_workers(Membership(found.address, "test", len(made)))
        yield used
        used.close()
    finally:
        ray.shutdown()


def both(workers, names, tmp_path_factory, *, timeout, texts, rows):
    paths = [f"{tmp_path_factory.getbasetemp() / 'workers0' / 'rewards.py'}:{n}" for n in names]
    there = load_remote_rewards(workers, paths, timeout=timeout)
    here = load_rewards(paths, timeout=timeout)
    return score(there, texts, rows), score(here, texts, rows)


def test_scores_equal_those_of_this_process(workers, tmp_path_factory):
    texts = ["a", "raise", "bb", "nan", "ccc", "slow", *("d" * i for i in range(20))]
    rows = [{"answer": i} for i in range(len(texts))]
    names = ["length", "later", "rank"]
    there, here = both(workers, names, tmp_path_factory, timeout=5.0, texts=texts, rows=rows)
    np.testing.assert_array_equal(there.total, here.total)
    assert there.failures == here.failures == {"length": 3, "later": 0, "rank": 0}
    for name, values in here.components.items():
        np.testing.assert_array_equal(there.components[name], values)
    assert there.first_failure == here.first_failure
    assert "rewards.py" in (there.first_failure or "")


def test_completion_that_ends_its_worker_fails_alone(workers, tmp_path_factory):
    path = f"{tmp_path_factory.getbasetemp() / 'workers0' / 'rewards.py'}:deadly"
    texts = ["a", "die", "bb", *("d" * i for i in range(20))]
    scored = score(load_remote_rewards(workers, [path]), texts, [{}] * len(texts))
    assert "each of 3 workers died" in (scored.first_failure or "")
    wanted = [np.nan if text == "die" else len(text) for text in texts]
    np.testing.assert_array_equal(scored.total, wanted)


def test_costly_rewards_run_side_by_side(workers, tmp_path, tmp_path_factory):
    path = f"{tmp_path_factory.getbasetemp() / 'workers0' / 'rewards.py'}:costly"
    terms = load_remote_rewards(workers, [path])
    for attempt in itertools.count():  # a worker that another test ended starts again
        log = tmp_path / str(attempt)
        assert score(terms, ["a"] * 8, [{"log": str(log)}] * 8).total.sum() == 8
        spans = sorted(tuple(map(float, line.split())) for line in log.read_text().splitlines())
        assert len(spans) == 8
        if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans)):
            return  # one worker makes one call after another


def test_worker_that_is_added_takes_load_until_it_is_removed(workers):
    def seen(*, until):
        found, late = set(), time.monotonic() + 200
        while not until(found):
            assert time.monotonic() < late, (found, workers.count)
            calls = [workers.submit(os.getpid) for _ in range(8)]
            found |= {call.result() for call in calls}
            time.sleep(0.05)
        return found

    before = seen(until=lambda found: len(found) >= 2)
    options = {"name": worker_name(2), "num_cpus": 0, "max_restarts": -1}
    added = ray.remote(Worker).options(**options).remote(os.getcwd(), [], processors=1)
    after = seen(until=lambda found: found - before and workers.count == 3)
    assert after - before
    ray.kill(added)
    seen(until=lambda found: workers.count == 2)


def test_function_that_cannot_be_loaded_is_named(workers, tmp_path_factory):
    path = f"{tmp_path_factory.getbasetemp() / 'workers0' / 'rewards.py'}:lenght"
    with pytest.raises(ValueError, match=r"reward.path = .*did you mean length\?"):
        load_remote_rewards(workers, [path])


@pytest.mark.parametrize(
    "keys",
    [
        {"reward.path": "{}/code.py:early,{}/code.py:fatal"},
        {"reward.path": "{}/code.py:early,{}/code.py:rank"},
        {"environment.name": "{}/code.py:Twice", "reward.path": "{}/code.py:early"},
    ],
    ids=["a worker dies", "batched", "environment"],
)
def test_groups_equal_those_of_this_process(workers, server, tmp_path, keys):
    write_material(tmp_path)
    server.reply = reply
    keys = {name: text.replace("{}", str(tmp_path)) for name, text in keys.items()}
    found = []
    for used in (workers, None):
        notes: list[str] = []
        source = open_source(tmp_path, server, workers=used, **keys)._replace(note=notes.append)
        progress = Progress()
        batches = [collect(source, progress=progress, seconds={}) for _ in range(2)]
        rollouts = [str(to_json(r)) for batch in batches for r in batch.sampled]
        source.sampler.close()
        numbers = [batch.numbers for batch in batches]
        found.append((rollouts, str(numbers), str(progress.to_json()), notes))
        if used is workers:
            assert str(os.getpid()) not in (tmp_path / "imported").read_text().split()
    assert found[0][0] == found[1][0]
    assert found[0][1:] == found[1][1:]
    assert (tmp_path / "mark").exists() == ("fatal" in keys["reward.path"])


def test_stream_through_workers_loses_no_group_and_trains_none_twice(workers, server, tmp_path):
    write_material(tmp_path)
    server.reply = reply
    code = f"{tmp_path}/code.py:early,{tmp_path}/code.py:fatal"
    keys = {"reward.path": code, "train.steps": 6, "rollouts.max_staleness": 6}
    keys |= {"train.train_batch": 2}
    source, progress = open_source(tmp_path, server, workers=workers, **keys), Progress()
    trained = []
    with Stream(source, progress, interrupt=Interrupt()) as stream:
        for _ in range(6):
            batch = stream.collect(seconds={})
            assert batch is not None
            trained += [r.group for r in batch.batch]
            progress.step += 1
    assert trained == [group for group in range(12) for _ in range(4)]
    assert (tmp_path / "mark").exists()
