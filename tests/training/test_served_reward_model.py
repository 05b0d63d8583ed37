"""A reward model behind a server; a stand-in speaks the part of vLLM's protocol that it needs."""

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.builders import served_model
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import find_models
from jaxrl.builders.reward_model import load_reward_model
from jaxrl.builders.served_model import connect_reward_model, serves_scores
from jaxrl.core.batch import given_rollout
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.run_config import run_config
from tests.sampling.serving import (
    FP32,
    SERVED,
    config as serving_config,
    stock_server,
    write_material,
)
from tests.training import small_runs
from tests.training.json_server import JsonHandler, serving


class _Classifier(JsonHandler):
    """Scores token ids by a tenth of their sum; answers in reverse order. Fails in the list."""

    tokenizer: Any
    failing: ClassVar[list[int]] = []
    labels = 1

    def get(self) -> None:
        self.answer({"data": [{"id": "m", "max_model_len": 32}]})

    def post(self, body: Any) -> None:
        if self.path == "/detokenize":
            self.answer({"prompt": self.tokenizer.decode(body["tokens"])})
            return
        assert self.path == "/classify"
        assert body["use_activation"] is False
        if self.failing and len(body["input"]) > 1:
            self.answer({"error": "no memory"}, status=self.failing.pop())
            return
        data = [
            {"index": i, "probs": [sum(ids) / 10] * self.labels, "num_classes": self.labels}
            for i, ids in enumerate(body["input"])
        ]
        self.answer({"data": data[::-1]})


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return small_runs.write_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def url(material) -> Iterator[str]:
    _Classifier.tokenizer = huggingface.Checkpoint(material / "model").tokenizer
    with serving(_Classifier) as address:
        yield address


def config(material, url, **changes):
    own = {"reward.path": "", "reward.model": url, "data.max_prompt_tokens": 24}
    return run_config(material, **own | changes)


def test_scores_are_those_of_the_sampled_tokens(material, url, monkeypatch):
    policy: Any = huggingface.Checkpoint(material / "model")
    assert serves_scores(config(material, url))
    score = connect_reward_model(config(material, url), policy)  # 24 + 8 tokens, as many as fit
    found = score([given_rollout([5, 6], [7, 8, 9]), given_rollout([5], [4])])
    assert found.tolist() == [3.5, 0.9]
    with pytest.raises(ValueError, match=r"accepts 32 tokens, but .* needs 33 .*max_tokens\)"):
        connect_reward_model(config(material, url, **{"sampling.max_tokens": 9}), policy)
    monkeypatch.setattr(_Classifier, "labels", 2)
    assert not serves_scores(config(material, url))
    with pytest.raises(ValueError, match="start a teacher with `jaxrl serve` or a reward model"):
        serves_scores(config(material, "http://127.0.0.1:1"))


def test_a_run_learns_from_a_server_that_fails_at_times(
    material, url, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_Classifier, "failing", [500, 503])
    monkeypatch.setattr(served_model, "_WAITS", (0.0, 0.0))
    keys = {"reward.path": f"{material}/reward.py:early_letters", "reward.weights": "0,1"}
    keys |= {"reward.model": url, "sampling.temperature": "0.7", "samples.every": 1}
    small_runs.run(material, tmp_path, **keys, **{"train.steps": 2})
    for entry in (e for e in read_metrics(tmp_path / "metrics.jsonl") if "reward/failed" in e):
        assert entry["reward/failed"] == 0
        assert entry["reward"] == pytest.approx(entry["reward/model"])
    assert not _Classifier.failing
    samples = read_metrics(tmp_path / "samples.jsonl")
    sample = [one for one in samples if not one.get("held_out")][-1]
    ids = _Classifier.tokenizer.encode(
        sample["prompt"] + "".join(sample["tokens"]), add_special_tokens=False
    )
    assert sample["reward"] == pytest.approx(sum(ids) / 10)
    _Classifier.failing += [500, 500, 500]
    with pytest.raises(RuntimeError, match="the rewards of all 12 rollouts failed"):
        small_runs.run(material, tmp_path, **keys, **{"train.steps": 3})
    assert "reward.model: POST" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build is for Linux")
def test_served_reward_model_is_the_embedded_one(tmp_path):
    """vLLM's classifier scores token ids of the same checkpoint as the learner's process does."""
    sizes = dataclasses.replace(SERVED, scored=True)
    params = tiny.params(1, config=sizes)
    params |= {"score": jax.random.normal(jax.random.key(0), params["score"].shape)}
    path = tmp_path / "scorer"
    write_material(tmp_path)
    shutil.copytree(tmp_path / "model", path)
    huggingface.save(path, params, sizes, dtype=FP32.wire)
    rollouts = [one._replace(action_mask=one.logprobs < 0) for one in tiny.rollouts(9, longest=24)]
    with stock_server(path, "--runner", "pooling") as url:
        served, own = (serving_config(tmp_path, reward__model=model) for model in (url, f"{path}"))
        assert serves_scores(served)
        theirs = connect_reward_model(served, huggingface.Checkpoint(tmp_path / "model"))(rollouts)
    ours = load_reward_model(own, find_models(own), layout=make_layout(own.mesh))(rollouts)
    assert np.std(ours) > 1
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)
