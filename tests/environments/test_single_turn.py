"""Rollouts of the library: sampled from the distribution that the learner scores."""

from typing import Any

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
        ({"temperature": 0.0}, r"temperature=0: .*to evaluate, use `Sampler\.sample`"),
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
