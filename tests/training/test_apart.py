"""Critic, reference and reward model on devices of their own, and a reference on a server."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import huggingface
from jaxrl.builders.layout import make_layout
from jaxrl.builders.learner import open_learning
from jaxrl.builders.model import find_models
from jaxrl.builders.recipe import make_recipe
from jaxrl.config.toml_file import ConfigError
from jaxrl.core.batch import given_rollout
from jaxrl.core.packing import MinibatchShape, pack_minibatch, unpack
from jaxrl.core.precision import PRESETS
from jaxrl.learner.policy import make_score
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.run_config import run_config
from tests.training import small_runs
from tests.training.json_server import JsonHandler, sampled, serving

KEYS = {"loss.kl": 0.1, "train.train_batch": 4, "data.eval_path": "none"}
PPO = {"loss.name": "ppo", "reward.kl": 0.01, "train.updates_per_rollout": 2}
APART = {"mesh.data": 2, "critic_mesh.data": 1, "critic_mesh.fsdp": 2}
APART |= {"reference_mesh.data": 2, "reward_mesh.data": 2}
NUMBERS = ("loss", "grad_norm", "reward/kl", "kl/reference", "kl/teacher", "value/loss")


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return small_runs.write_material(tmp_path_factory.mktemp("material"))


def rows(run_dir: Path) -> list[dict]:
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]


def assert_same(one: Path, other: Path) -> None:
    """Compares the numbers of each step and the trained weights."""
    for here, there in zip(rows(one), rows(other), strict=True):
        for name in {*NUMBERS} & here.keys():
            assert here[name] == pytest.approx(there[name], rel=1e-4, abs=1e-6), name
    mine, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    for name, array in mine.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-3, atol=2e-5)


def test_with_fixed_sums_values_do_not_depend_on_the_rest_of_the_batch(material):
    config = run_config(material, loss__name="ppo", precision="fp32,sums=fixed")
    layout = make_layout(config.mesh, precision=config.precision)
    given = {"models": find_models(config), "layout": layout}
    learning, state = open_learning(config, make_recipe(config), **given)
    head = np.random.default_rng(0).normal(size=(1, tiny.CONFIG.hidden_size))
    critic = state.critic_state
    params = critic.params | {"score": head.astype(np.float32)}
    state = state._replace(critic=dataclasses.replace(critic, params=params))

    def values(rollouts) -> np.ndarray:
        shape = dataclasses.replace(
            learning.shape, rows_per_microbatch=len(rollouts), max_rows=len(rollouts)
        )
        minibatch = pack_minibatch(rollouts, [0.0] * len(rollouts), shape=shape)
        found = np.asarray(learning.critic.values(state, minibatch))
        return unpack(found, rollouts, shape=shape)[0]

    rollouts = tiny.rollouts(32, longest=config.longest_sequence)
    np.testing.assert_array_equal(values(rollouts), values(rollouts[:1]))


def test_critic_and_reference_on_meshes_of_their_own(material, tmp_path):
    """The same numbers as on one device, and a run goes over to them. Copies are counted."""
    keys = KEYS | PPO | {"reward.model": material / "teacher"}
    small_runs.run(material, tmp_path / "one", **keys)
    small_runs.run(material, tmp_path / "apart", **keys | APART)
    assert_same(tmp_path / "one", tmp_path / "apart")
    tokens = 2 * 6 * 128  # both minibatches
    # Seven arrays of 4 bytes and a mask of 1; values and returns once the targets are known.
    sent, with_targets = 7 * 4 + 1, 9 * 4 + 1
    for row in rows(tmp_path / "apart"):
        # For reward.kl and for loss.kl, with a log-prob back.
        assert row["reference/bytes_sent"] == tokens * (sent + with_targets + 2 * 4)
        # For two values back, and for the step.
        assert row["critic/bytes_sent"] == tokens * (sent + 2 * 4 + with_targets)
    resumed = small_runs.run(material, tmp_path / "one", **keys | APART | {"train.steps": 3})
    assert resumed.step == 3


class _Reference(JsonHandler):
    """Speaks the part of vLLM's protocol that a reference needs, with the scores of a model."""

    tokenizer: Any
    score: Any

    def get(self) -> None:
        self.answer({"data": [{"id": "m", "max_model_len": 64}]})

    def post(self, body: Any) -> None:
        if self.path == "/detokenize":
            self.answer({"prompt": self.tokenizer.decode(body["tokens"])})
            return
        if self.path == "/v1/completions":
            self.answer(sampled(body, gap=0.3))
            return
        assert self.path == "/inference/v1/generate"
        ids = body["token_ids"]
        shape = MinibatchShape(row_length=64, rows_per_microbatch=1)
        minibatch = pack_minibatch([given_rollout(ids[:1], ids[1:])], [0.0], shape=shape)
        found = np.asarray(type(self).score(minibatch))[0, 1 : len(ids)].tolist()
        entries = [{str(i): {"logprob": x}} for i, x in zip(ids[1:], found, strict=True)]
        choice = {"weight_versions": [{"version": "default", "start": 0, "end": 1}]}
        self.answer({"choices": [choice], "prompt_logprobs": [None, *entries]})


@pytest.fixture
def url(material) -> Iterator[str]:
    _Reference.tokenizer = huggingface.Checkpoint(material / "model").tokenizer
    score = make_score(tiny.model(), precision=PRESETS["fp32"])
    _Reference.score = functools.partial(jax.jit(score), tiny.params())
    with serving(_Reference) as address:
        yield address


def test_a_reference_on_a_server_is_the_initial_model(material, url, tmp_path):
    small_runs.run(material, tmp_path / "own", **KEYS)
    small_runs.run(material, tmp_path / "served", **KEYS, **{"reference.server": url})
    assert_same(tmp_path / "own", tmp_path / "served")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"critic_mesh.fsdp": 2}, r"\[critic_mesh\] fsdp = 2 has no effect while data = 0"),
        ({"critic_mesh.data": 1, "critic.trunk": "shared"}, "critic_mesh and critic.trunk"),
        ({"reward_mesh.data": 1}, "reward_mesh is for a model in a directory, and .* None"),
        ({"critic_mesh.data": 3}, "divides the 2 rows of a microbatch into 3 shards"),
        ({"reference.server": "host:1"}, "is not the address of a server"),
        (
            {"reference.server": "http://h:1", "sampling.temperature": 0.5},
            "vLLM scores given tokens only at a temperature of 1",
        ),
        (
            {"reference.server": "http://h:1", "reference_mesh.data": 1},
            "reference_mesh and reference.server",
        ),
        *(
            (
                {key: "http://h:1", "sampler.name": "vllm", "sampler.url": ["http://h:1/"]},
                f"{key} = 'http://h:1' is in sampler.url, whose servers get the learner's weights",
            )
            for key in ("reference.server", "reward.model")
        ),
    ],
)
def test_contradictions_are_refused(changes, said, material):
    with pytest.raises(ConfigError, match=said):
        run_config(material, **{"data.max_prompt_tokens": 24} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reference_mesh.data": 1}, "reference_mesh, but loss and reward use no reference"),
        ({"critic_mesh.data": 1}, "critic_mesh, but loss and reward use no critic"),
        ({"reference.server": "http://h:1"}, "reference.server = .* use no reference"),
        (
            {"reference_mesh.data": 8, "loss.kl": 0.1, "train.microbatch_tokens": 256},
            "reference_mesh = 8 leaves the learner none",
        ),
    ],
)
def test_devices_of_a_model_that_the_run_does_not_have(changes, said, material, tmp_path):
    with pytest.raises(ValueError, match=said):
        small_runs.run(material, tmp_path, **changes)
