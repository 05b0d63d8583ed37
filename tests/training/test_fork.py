"""A fork goes on from a checkpoint of another run, under other keys."""

from pathlib import Path

import pytest

from jaxrl.cli import main
from jaxrl.learner.checkpoints import CheckpointError
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.fork import Fork
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.buffer import Buffer, Counts
from jaxrl.training.run_directory import ResumeError
from tests import tiny
from tests.run_config import run_arguments
from tests.training.small_runs import host, run, state, supervised, write_material, write_rows


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def old(material, tmp_path_factory):
    """Four steps, with a checkpoint after each."""
    run_dir = tmp_path_factory.mktemp("old") / "run"
    run(material, run_dir, **{"train.steps": "4", "train.dynamic_sampling_rounds": "1"})
    return run_dir


@pytest.fixture(scope="module")
def old_texts(material, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("old_texts") / "run"
    supervised(material, run_dir, **{"train.steps": "4"})
    return run_dir


def fork(material, old, run_dir, *, step=2, **changes):
    keys = {"train.steps": "4", "train.dynamic_sampling_rounds": "1"}
    return run(material, run_dir, fork=f"{old}@{step}", **keys | changes)


def numbers(run_dir, *, after):
    """Metrics after a step, without times."""
    timed = ("time", "tokens_per_second")
    return [
        {k: v for k, v in entry.items() if not k.startswith(timed)}
        for entry in read_metrics(run_dir / "metrics.jsonl")
        if entry["step"] > after
    ]


def test_fork_without_changes_is_the_run(material, old, tmp_path, capsys):
    fork(material, old, tmp_path / "new")
    assert f"forked from {old}@2: nothing is changed" in capsys.readouterr().err
    assert state(tmp_path / "new", 2) == state(old, 2)
    assert state(tmp_path / "new", 4) == state(old, 4) != state(old, 2)
    assert host(tmp_path / "new", 4) == host(old, 4)
    assert numbers(tmp_path / "new", after=2) == numbers(old, after=2) != []
    (start,) = read_metrics(tmp_path / "new" / "starts.jsonl")
    assert (start["step"], start["forked_from"]) == (2, f"{old}@2")
    # The same command resumes; so does one without --fork.
    assert (
        run(
            material,
            tmp_path / "new",
            fork=str(old),
            **{"train.steps": "5", "train.dynamic_sampling_rounds": "1"},
        ).step
        == 5
    )
    with pytest.raises(ResumeError, match=r"did not begin as a fork of .*@3; choose another"):
        fork(material, old, tmp_path / "new", step=3, **{"train.steps": "5"})


def test_other_learning_rate_differs_from_there_on(material, old, tmp_path, capsys):
    fork(material, old, tmp_path / "new", **{"optimizer.learning_rate": "0.001"})
    assert "optimizer.learning_rate = 0.01 there and 0.001 here" in capsys.readouterr().err
    assert state(tmp_path / "new", 2) == state(old, 2)
    assert state(tmp_path / "new", 3) != state(old, 3)
    ours, theirs = (numbers(d, after=2)[0] for d in (tmp_path / "new", old))
    assert ours["reward"] == theirs["reward"]
    assert ours["grad_norm"] == theirs["grad_norm"]
    assert (ours["learning_rate"], theirs["learning_rate"]) == (0.001, pytest.approx(0.01))


def test_other_data_begin_at_position_0(material, old, tmp_path, capsys):
    path = tmp_path / "others.jsonl"
    write_rows(path, [{"prompt": f"{i}*{i}=", "answer": "1"} for i in range(7)])
    fork(material, old, tmp_path / "new", step=4, **{"data.path": path, "train.steps": "5"})
    assert "other training data, which begin at position 0" in capsys.readouterr().err
    assert host(tmp_path / "new", 4)["position"] == 0 < host(old, 4)["position"]
    assert host(tmp_path / "new", 4)["pending"] == []


def test_same_data_in_another_file_go_on(material, old, tmp_path):
    (tmp_path / "moved.jsonl").write_bytes((material / "prompts.jsonl").read_bytes())
    changes = {"data.path": tmp_path / "moved.jsonl", "train.steps": "5"}
    fork(material, old, tmp_path / "new", step=4, **changes)
    assert host(tmp_path / "new", 4)["position"] == host(old, 4)["position"]


@pytest.mark.parametrize(
    ("key", "value", "there"),
    [
        ("optimizer.name", "sgd", "'adamw' there and 'sgd' here"),
        ("lora.rank", "2", "0 there and 2 here"),
        ("precision", "bf16", "'fp32' there and 'bf16' here"),
        ("loss.name", "ppo", "'grpo' there and 'ppo' here"),
    ],
)
def test_state_that_does_not_fit_is_refused_by_key(material, old, tmp_path, key, value, there):
    with pytest.raises(ResumeError, match="its state does not fit") as error:
        fork(material, old, tmp_path / "new", **{key: value})
    assert f"{key} = {there}" in str(error.value)
    assert not (tmp_path / "new" / "checkpoints" / "2").exists()


def test_other_model_is_refused_by_key(material, old, tmp_path):
    tiny.write_checkpoint(tmp_path / "moe", config=tiny.MOE)
    with pytest.raises(ResumeError, match=r"model\.path = .*/model' there and .*/moe' here"):
        fork(material, old, tmp_path / "new", **{"model.path": tmp_path / "moe"})


def test_fork_is_named_by_the_refusal_and_checked(material, old, tmp_path):
    with pytest.raises(ResumeError, match=rf"another config.*--fork {old} to go on"):
        run(material, old, **{"optimizer.learning_rate": "1"})
    with pytest.raises(ResumeError, match=r"no such checkpoint; steps in .*: 1, 2, 3, 4"):
        fork(material, old, tmp_path / "new", step=7)
    with pytest.raises(ResumeError, match=r"train\.steps = 2 counts from the beginning of"):
        fork(material, old, tmp_path / "new", **{"train.steps": "2"})
    with pytest.raises(ResumeError, match=r"config\.toml is not the config of a run"):
        supervised(material, tmp_path / "new", fork=f"{old}@1")
    with pytest.raises(ResumeError, match="did not begin as a fork"):
        fork(material, old, old, **{"train.steps": "4"})


def test_damaged_checkpoint_is_no_matter_of_keys(material, old, tmp_path):
    path = old / "checkpoints" / "1" / "host" / "metadata"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"position"', b'"positiom"'))
    with pytest.raises(CheckpointError, match="is damaged"):
        fork(material, old, tmp_path / "new", step=1, **{"optimizer.learning_rate": "0.1"})
    path.write_bytes(before)


def test_lost_fork_does_not_start_from_nothing(material, old, tmp_path):
    write_rows(tmp_path / "starts.jsonl", [{"step": 2, "forked_from": f"{old}@2"}])
    with pytest.raises(ResumeError, match=r"began as a fork of .*@2, and its checkpoints are gone"):
        run(material, tmp_path)


def test_command_forks(material, old, tmp_path, capsys):
    arguments = run_arguments(material, run_dir=tmp_path / "new")
    assert main(["train", *arguments, "--fork", f"{old}@9"]) == 1
    assert "steps in" in capsys.readouterr().err


def test_supervised_fork(material, old_texts, tmp_path, capsys):
    new, keys = tmp_path / "new", {"train.steps": "4"}
    supervised(material, new, fork=f"{old_texts}@2", **keys)
    assert state(new, 4) == state(old_texts, 4)
    assert host(new, 4)["position"] == 12
    assert read_metrics(new / "starts.jsonl")[0]["forked_from"] == f"{old_texts}@2"
    write_rows(tmp_path / "texts.jsonl", [{"prompt": "a", "completion": "b"}] * 5)
    capsys.readouterr()
    keys |= {"data.path": tmp_path / "texts.jsonl", "train.batch_size": "2"}
    supervised(material, tmp_path / "other", fork=str(old_texts), **keys | {"train.steps": "5"})
    assert "which begin at position 0" in capsys.readouterr().err
    assert (host(tmp_path / "other", 4)["position"], host(tmp_path / "other", 5)["position"]) == (
        0,
        2,
    )
    keys = {"optimizer.name": "sgd", "train.steps": "4"}
    with pytest.raises(ResumeError, match="'adamw' there and 'sgd' here"):
        supervised(material, tmp_path / "sgd", fork=f"{old_texts}@2", **keys)


def test_rollouts_of_other_keys_are_dropped():
    """Counts bound how far an asynchronous run samples ahead, so they must add up."""
    pending = [r._replace(group=7) for r in tiny.rollouts(4)]
    at = {"step": 3, "position": 40, "running": [8], "coefficients": {"kl": 0.3}}
    counts = {"sampled": 13, "trained": 12, "stale": 0, "zero_variance": 0}
    kept = {"pending": pending, "replay": pending, "counts": counts}

    def adapted(*changed):
        progress = Progress(**kept, **at)
        Fork(Path("x"), 3, dict.fromkeys(changed, ""), {}, "x").adapt(progress, batch=2)
        return progress

    same = adapted("optimizer.learning_rate", "mesh.data")
    assert same == Progress(**kept, **at)
    other_loss = adapted("loss.kl")
    assert other_loss == Progress(**kept, **at | {"coefficients": {}})
    buffer = Buffer(batch=2, batches=9, max_staleness=1, counts=Counts(**adapted("seed").counts))
    assert adapted("seed").pending == adapted("seed").replay == adapted("seed").running == []
    assert adapted("seed").position == 40
    assert len(buffer.begin(next_number=40, step=3, most=99)) == 2 * 2  # two batches ahead
    assert adapted("data.path").position == 0
