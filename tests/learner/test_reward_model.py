"""A reward model as the reward: the scores of single sequences, by the ids that were sampled."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxrl import huggingface, train
from jaxrl.builders.reward_model import score_rollouts
from jaxrl.config.toml_file import ConfigError
from jaxrl.core.packing import MinibatchShape
from jaxrl.core.precision import PRESETS
from jaxrl.environments.rewards import score
from jaxrl.learner.reward_model import make_scores
from jaxrl.models.model import decoder
from jaxrl.models.scorer import token_scores
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.run_config import run_config

FP32 = PRESETS["fp32"]
CONFIG = dataclasses.replace(tiny.CONFIG, scored=True)


def params(seed=0):
    made = tiny.params(seed, config=CONFIG)
    return made | {"score": jax.random.normal(jax.random.key(seed), made["score"].shape)}


@pytest.fixture(scope="module")
def reward_model():
    model = decoder(CONFIG)
    return functools.partial(
        score_rollouts,
        params=params(),
        scores=jax.jit(make_scores(model, precision=FP32)),
        shape=MinibatchShape(row_length=24, rows_per_microbatch=2, sharding=jax.devices()[0]),
    )


def test_ratings_equal_each_sequence_alone(reward_model):
    rollouts = tiny.rollouts(5)  # the last microbatch is not full
    got = reward_model(rollouts)
    model = decoder(CONFIG)
    for rollout, value in zip(rollouts, got, strict=True):
        tokens = jnp.asarray([*rollout.prompt, *rollout.completion])[None]
        hidden = model.hidden(
            params(),
            tokens,
            jnp.arange(tokens.shape[1])[None],
            jnp.ones_like(tokens),
            precision=FP32,
        )
        alone = token_scores(hidden, params()["score"], precision=FP32)[0, -1]
        np.testing.assert_allclose(value, alone, rtol=1e-4, atol=1e-5)
    assert np.ptp(got) > 0.1


def test_non_finite_score_is_a_failure(reward_model):
    broken = params() | {"score": jnp.full((1, CONFIG.hidden_size), jnp.inf)}
    values = reward_model(tiny.rollouts(3), params=broken)
    assert np.isnan(values).all()
    scored = score.with_component(
        score.score([], ["a", "b", "c"], [{}] * 3), "model", values=values, weight=1.0
    )
    assert np.isnan(scored.total).all()
    assert scored.failures == {"model": 3}
    assert scored.first_failure.startswith("reward model is nan on one of 3 failed completions")


def test_parts_are_weighted_and_added():
    half = score.Reward("half", lambda completion, example: 0.5, 2.0)
    scored = score.score([half], ["a", "b"], [{}] * 2)
    both = score.with_component(scored, "model", values=np.array([3.0, -1.0]), weight=0.5)
    np.testing.assert_array_equal(both.total, [2.5, 0.5])
    np.testing.assert_array_equal(both.components["half"], [0.5, 0.5])
    np.testing.assert_array_equal(both.components["model"], [3.0, -1.0])


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    directory = tmp_path_factory.mktemp("material")
    tiny.write_checkpoint(directory / "policy")
    save(directory / "reward_model", source=directory / "policy")
    rows = [{"prompt": p, "answer": p} for p in ("ab", "cd", "ef", "gh")]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return directory


def save(directory, *, source):
    source = huggingface.Checkpoint(source)
    huggingface.save(directory, params(), CONFIG, dtype=FP32.params, source=source)


def config(material, run_dir, **changes):
    own = {
        "run_dir": run_dir,
        "model.path": material / "policy",
        "reward.model": material / "reward_model",
        "reward.weights": "0,1",
        "train.steps": 12,
        "train.group_size": 8,
        "train.microbatch_tokens": 256,
        "optimizer.learning_rate": 0.005,
    }
    return run_config(material, **own | changes)


def test_training_raises_the_reward_models_score(material, tmp_path):
    train.train(config(material, tmp_path))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    rewards = [row["reward/model"] for row in rows]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.5
    assert [row["reward"] for row in rows] == rewards  # the function weighs nothing
    assert all("reward/exact_match" in row for row in rows)


def test_a_model_with_another_tokenizer_is_refused(material, tmp_path):
    """It would read the policy's token ids as other text, and ids that it lacks as its last one."""

    def refused(match, **keys):
        with pytest.raises(ValueError, match=match):
            train.train(config(material, tmp_path / "run", **keys))

    save(tmp_path / "other", source=material / "policy")
    tokenizer = Tokenizer.from_file(f"{material}/policy/tokenizer.json")
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content))
    differs = "its tokenizer is not the policy's: 2 tokens differ, such as 'a' with the id 4 there"
    for key, more in (("reward.model", {}), ("critic.path", {"loss.name": "ppo"})):
        refused(f"{key} = '.*/other' .*{differs}", **{key: f"{tmp_path}/other"}, **more)


def test_evaluation_needs_a_reward_function(material):
    with pytest.raises(ConfigError, match=r"reward\.path is missing, and so are reward\.model"):
        config(material, "x", **{"reward.path": "", "reward.model": "none", "reward.weights": ""})
    keys = {"reward.path": "", "reward.weights": "", "data.eval_path": "x.jsonl"}
    with pytest.raises(ConfigError, match=r"data\.eval_path needs a function in reward\.path"):
        config(material, "x", **keys)
