"""Rollouts of the library: sampled from the distribution that the learner scores."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxrl
from jaxrl.core.batch import Rollout
from jaxrl.huggingface.checkpoint import Checkpoint
from tests import tiny

EXAMPLES = [{"prompt": "1 + 1 ="}]


@pytest.fixture
def rollouts(tmp_path):
    tokenizer = Checkpoint(tiny.write_checkpoint(tmp_path)).tokenizer
    sampler = jaxrl.EmbeddedSampler(tiny.model(), tiny.params())

    def sample(changes: dict[str, Any], **options: Any) -> list[Rollout]:
        params = jaxrl.SamplingParams(max_tokens=6, **changes)
        options |= {"tokenizer": tokenizer, "reward": lambda text, example: text.count("e")}
        return jaxrl.rollouts(sampler, EXAMPLES, params=params, group_size=4, **options)

    return sample


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": 0.5}, r"temperature=0\.5: .* at temperature 1, .*pass temperature=T to"),
        ({"temperature": 0.0}, r"temperature=0: .*to evaluate, use `jaxrl\.accuracy`"),
        ({"top_p": 0.9}, r"top_p=0\.9: .* over all tokens, .*leave top_p at 1 "),
        ({"top_k": 20}, r"top_k=20: .*leave top_k at 0 "),
        ({"min_p": 0.1}, r"min_p=0\.1: .*leave min_p at 0 "),
    ],
)
def test_a_distribution_that_the_learner_does_not_score_is_refused(rollouts, asked, message):
    with pytest.raises(ValueError, match=message):
        rollouts(asked)


def test_a_model_at_another_temperature_learns_from_its_own_distribution(rollouts):
    recipe, model = jaxrl.grpo(), tiny.model()._replace(temperature=0.5)
    learner = jaxrl.make_learner(model, recipe.objective, optimizer=optax.sgd(0.1))
    batch = jaxrl.minibatch(rollouts({"temperature": 0.5}, temperature=0.5), recipe.advantages)
    metrics = jaxrl.jit(learner.step)(learner.init(tiny.params()), batch)[1]
    assert abs(jaxrl.to_floats(metrics)["mismatch/kl"]) < 1e-5  # f32 rounds by 1e-6
    with pytest.raises(ValueError, match=r"temperature=1: .* at temperature 0\.5"):
        rollouts({}, temperature=0.5)


def test_accuracy_is_the_mean_reward_of_greedy_completions(tmp_path):
    tokenizer = Checkpoint(tiny.write_checkpoint(tmp_path)).tokenizer
    sampler = jaxrl.EmbeddedSampler(tiny.model(), tiny.params())
    examples = [{"prompt": text, "good": text[0]} for text in ("1 + 1 =", "2 + 3 =", "4 + 4 =")]
    params = jaxrl.SamplingParams(max_tokens=6, temperature=0.7, seed=3)
    texts = {}

    def reward(text, example):
        texts[example["rendered_prompt"]] = text
        return float(example["good"] in "14")

    found = jaxrl.accuracy(sampler, examples, params=params, tokenizer=tokenizer, reward=reward)
    assert found.mean == pytest.approx(2 / 3)
    assert found.half_interval == pytest.approx(1.96 * np.std([1, 0, 1], ddof=1) / 3**0.5)
    for prompt, text in texts.items():
        ids = np.array(tokenizer.encode(prompt, add_special_tokens=False), np.int32)
        greedy = jaxrl.SamplingParams(max_tokens=6, temperature=0.0)
        (one,) = sampler.sample([ids], greedy, group_size=1)
        assert text == tokenizer.decode(one.tokens, skip_special_tokens=True)
    with pytest.raises(ValueError, match="examples is empty"):
        jaxrl.accuracy(sampler, [], params=params, tokenizer=tokenizer, reward=reward)


def test_a_saved_model_is_the_one_that_was_trained(tmp_path):
    base = jaxrl.load(tiny.write_checkpoint(tmp_path / "base"))
    trained = jax.tree.map(lambda x: x * 1.5, base.params)
    jaxrl.save(base, trained, tmp_path / "out")
    again = jaxrl.load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again.params, trained)
    assert again.stop == base.stop
    assert again.tokenizer.get_vocab() == base.tokenizer.get_vocab()
    with pytest.raises(ValueError, match="was loaded from this directory; save to another"):
        jaxrl.save(base, trained, tmp_path / "base")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [("n", "pass group_size"), ("max_new_tokens", "max_tokens here"), ("tempo", "it takes max_to")],
)
def test_settings_of_other_libraries_are_answered(setting, hint):
    with pytest.raises(TypeError, match=f"no setting '{setting}'; .*{hint}"):
        jaxrl.SamplingParams(max_tokens=6, **{setting: 2})
