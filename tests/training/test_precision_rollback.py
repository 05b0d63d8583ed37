"""A real small run whose alarm changes its dtype policy, and which is killed and resumed."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import train
from jaxrl.commands.report.collect import collect
from jaxrl.config import alarms
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.core.loss_scale import init_loss_scale
from jaxrl.diagnostics.alarms.limits import Limits
from jaxrl.learner.actor_critic import State
from jaxrl.learner.update import LearnerState
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.progress import Progress
from jaxrl.training.resume import adapt_precision
from jaxrl.training.run import Run, open_run
from tests import tiny
from tests.run_config import run_config

NEW = "fp32,loss_scale=dynamic:4:1"  # doubles after every finite step
REWARD = "def digit(completion, example):\n    return float(completion[:1].isdigit())\n"


class KilledError(Exception):
    """Ends a program before it can save."""


@pytest.fixture(autouse=True)
def short_window(monkeypatch):
    """These runs are short."""
    monkeypatch.setattr(alarms, "LIMITS", Limits(warmup=5, window=2))


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Config:
    """An f32 learner and a bf16 sampler, and a clip so tight that their difference trips it."""
    directory = tmp_path_factory.mktemp("precision")
    tiny.write_checkpoint(directory / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    own = {
        "precision": "phantom",
        "data.max_prompt_tokens": 16,
        "reward.path": f"{directory}/reward.py:digit",
        "train.steps": 8,
        "train.microbatch_tokens": 256,
        "optimizer.learning_rate": 1e-6,
        "checkpoint.every": 2,
        "probe.every": 1,
        "probe.clip_range": "0.001,0.001",
        "alarms.phantom": "rollback_precision",
        "alarms.precision": NEW,
    }
    return run_config(directory, **own)


def kill_at(monkeypatch: Any, step: int, *, text: str) -> None:
    """The program dies after a step in a precision, before it is saved."""
    evaluate = train.evaluate

    def dying(run: Run, progress: Progress, **given: Any) -> float | None:
        if progress.step == step and run.config.precision.text == text:
            raise KilledError
        return evaluate(run, progress, **given)

    monkeypatch.setattr(train, "evaluate", dying)


def check_restored(run: Run, state: LearnerState) -> None:
    """The state is the checkpoint's of step 2, for a precision that has just begun."""
    new = run.config.precision
    there = run.checkpoints.restore(2, state).state
    assert float(there.loss_scale.scale) == 1.0
    for ours, saved in zip(
        jax.tree.leaves((state.step, state.params, state.opt_state)),
        jax.tree.leaves((there.step, there.params, there.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, saved)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {new.params}
    assert float(state.loss_scale.scale) == new.loss_scale.initial == 4.0
    sampler = cast(EmbeddedSampler, run.source.sampler)
    assert sampler._weights.params["embed"].dtype == new.sampler


def watch_opening(monkeypatch: Any) -> list[tuple[str, int]]:
    """(precision, step) whenever a run is opened."""
    opened: list[tuple[str, int]] = []

    @contextmanager
    def watched(config: Config, **given: Any) -> Iterator[Any]:
        with open_run(config, **given) as (run, state, progress):
            opened.append((run.config.precision.text, progress.step))
            if opened[-1] == (NEW, 2):
                check_restored(run, state.policy)
            yield run, state, progress

    monkeypatch.setattr(train, "open_run", watched)
    return opened


def column(run_dir: Path, name: str) -> dict[int, float]:
    return {e["step"]: e[name] for e in read_metrics(run_dir / "metrics.jsonl") if name in e}


def test_rollback_continues_in_another_precision(asked, monkeypatch):
    run_dir = Path(asked.run_dir)
    opened = watch_opening(monkeypatch)
    with monkeypatch.context() as patch:
        kill_at(patch, 7, text=NEW)  # after a checkpoint of the new precision
        with pytest.raises(KilledError):
            train.train(asked)
    assert opened == [("phantom", 0), (NEW, 2)]  # before the probes of steps 4 to 6
    (event,) = [e["event"] for e in read_metrics(run_dir / "metrics.jsonl") if "event" in e]
    assert (event["alarm"], event["at"], event["to"]) == ("phantom", 6, 2)
    assert (event["action"], event["changes"]) == ("rollback", {"precision": ["phantom", NEW]})
    rolled_back = read_metrics(run_dir / "rolled_back_1.jsonl")
    assert rolled_back[-1]["event"]["more"] == f"back to step 2 with precision 'phantom' -> '{NEW}'"
    page = collect(run_dir, name="run")
    assert page["config"]["precision"] == NEW
    assert [alarm["action"] for alarm in page["alarms"]] == ["rollback"]

    # The same command resumes in the new precision, and its loss scale is not reset again.
    done = train.train(asked)
    assert opened[2:] == [(NEW, 6)]
    assert (done.step, done.verdict) == (8, None)
    scales = dict(zip(range(1, 9), [1.0] * 2 + [2.0**n for n in range(2, 8)], strict=True))
    assert column(run_dir, "loss_scale") == scales
    assert all(column(run_dir, "probe/phantom")[step] == 0 for step in range(3, 9))
    assert column(run_dir, "skipped_steps")[8] == 0


def test_changed_precision_restarts_loss_scale():
    f32, f16 = precision.PRESETS["fp32"], precision.PRESETS["fp16_master"]
    skipped = dataclasses.replace(init_loss_scale(f32.loss_scale), skipped=jnp.int32(3))
    learner = LearnerState(jnp.int32(7), jnp.ones(2), (), skipped)
    counts = {"sampled": 9, "trained": 4, "stale": 1, "zero_variance": 1}
    written = {"pending": tiny.rollouts(9), "running": [5], "counts": counts}

    def taken_over(now: precision.Precision, before: str | None) -> tuple[State, Progress]:
        progress = Progress(precision=before, **written)
        return adapt_precision(State(learner), progress, precision=now), progress

    for before in (str(f32), None):  # the same precision, or a checkpoint that does not say
        state, progress = taken_over(f32, before)
        assert state.policy is learner
        assert (progress.counts, len(progress.pending)) == (counts, 9)
    state, progress = taken_over(f16, str(f32))
    assert float(state.policy.loss_scale.scale) == f16.loss_scale.initial == 65536
    assert (int(state.policy.loss_scale.skipped), int(state.policy.step)) == (3, 7)
    # Three pending groups of the other sampler dtypes: dropped, counted, sampled again.
    assert progress.pending == []
    assert progress.running == [0, 1, 2, 5]
    assert progress.counts == counts | {"stale": 4}
    # So are those of other arithmetic in the same dtypes.
    for change in ("blocks=e4m3", "logits=bf16", "sums=fixed", "latent=absorbed"):
        _, progress = taken_over(precision.parse(f"bf16_master,{change}"), "bf16_master")
        assert (progress.counts, progress.pending) == (counts | {"stale": 4}, [])
    # Where only the learner's dtypes change they stay.
    _, progress = taken_over(precision.parse("phantom"), str(precision.parse("bf16_master")))
    assert (progress.counts, len(progress.pending)) == (counts, 9)
