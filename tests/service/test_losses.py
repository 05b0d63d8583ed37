"""The losses of the Tinker API against their formulas in numpy and against jaxrl's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import losses
from jaxrl.core import TokenBatch
from jaxrl.losses import Scores
from jaxrl.service.losses import LOSSES, find

RNG = np.random.default_rng(0)
LOGPROBS = RNG.normal(-1, 0.7, (1, 8)).astype(np.float32)
SAMPLER = RNG.normal(-1, 0.7, (1, 8)).astype(np.float32)
ADVANTAGES = RNG.normal(0, 1, (1, 8)).astype(np.float32)
WEIGHTS = RNG.normal(0, 1, (1, 8)).astype(np.float32)
RATIO = np.exp(LOGPROBS - SAMPLER)
MEAN = np.exp((LOGPROBS - SAMPLER).mean())


def clipped(ratio, low, high):
    return -np.minimum(ratio * ADVANTAGES, np.clip(ratio, low, high) * ADVANTAGES)


# Value per token, and the derivative by its log-prob where it is not that of a clipped ratio.
FORMULAS = {
    "cross_entropy": (-LOGPROBS * WEIGHTS, -WEIGHTS),
    "importance_sampling": (-RATIO * ADVANTAGES, -RATIO * ADVANTAGES),
    "ppo": (clipped(RATIO, 0.8, 1.2), None),
    "cispo": (-np.clip(RATIO, 0, 4) * ADVANTAGES * LOGPROBS, -np.clip(RATIO, 0, 4) * ADVANTAGES),
    "dro": (
        -(LOGPROBS * ADVANTAGES - 0.025 * (LOGPROBS - SAMPLER) ** 2),
        -(ADVANTAGES - 0.05 * (LOGPROBS - SAMPLER)),
    ),
    "gspo": (clipped(np.full_like(RATIO, MEAN), 1 - 3e-4, 1 + 4e-4), None),
}

OURS = {
    "cross_entropy": losses.likelihood(),  # of advantages that are the weights
    "importance_sampling": losses.unclipped(losses.over_sampler),
    "ppo": losses.clipped(losses.over_sampler, low=0.2, high=0.2),
    "cispo": losses.truncated(losses.over_sampler, high=4) * losses.likelihood(),
    "gspo": losses.clipped(losses.sequence(losses.over_sampler), low=3e-4, high=4e-4),
}


def service_loss(name, logprobs):
    loss = LOSSES[name]
    arrays = {key: jnp.full((1, 8), value, jnp.float32) for key, value in loss.settings.items()}
    arrays |= {"weights": jnp.asarray(WEIGHTS), "sequence_ratio_mask": jnp.ones((1, 8))}
    arrays |= {"logprobs": jnp.asarray(SAMPLER), "advantages": jnp.asarray(ADVANTAGES)}

    def mean(values, marks):
        return jnp.broadcast_to(jnp.sum(values * marks) / jnp.sum(marks), values.shape)

    return loss.apply(logprobs, arrays, mean)


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients_follow_the_documented_formulas(name):
    value, slope = FORMULAS[name]
    np.testing.assert_allclose(service_loss(name, jnp.asarray(LOGPROBS)), value, rtol=1e-5)
    if slope is not None:
        found = jax.grad(lambda x: service_loss(name, x).sum())(jnp.asarray(LOGPROBS))
        np.testing.assert_allclose(found, slope, rtol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_losses_are_compositions_of_the_librarys(name):
    batch = TokenBatch(
        tokens=jnp.zeros((1, 8), jnp.int32),
        segments=jnp.ones((1, 8), jnp.int32),
        positions=jnp.arange(8, dtype=jnp.int32)[None],
        action_mask=jnp.ones((1, 8), bool),
        sampler_logprobs=jnp.asarray(SAMPLER),
        advantages=jnp.asarray(WEIGHTS if name == "cross_entropy" else ADVANTAGES),
    )

    def ours(logprobs):
        return OURS[name].apply(Scores(logprobs=logprobs), batch)[0]

    for of in (lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())):
        given = jnp.asarray(LOGPROBS)
        found = of(lambda x: service_loss(name, x))(given)
        np.testing.assert_allclose(found, of(ours)(given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("jaxrl.grpo", "ppo"), ("jaxrl.cispo high=4", "cispo"), ("jaxrl.gspo", "gspo")],
)
def test_recipes_sum_over_the_marked_tokens_of_their_sequences(recipe, name):
    lengths, marked = (5, 3), np.array([[0, 1, 1, 1, 1, 0, 1, 1]], np.float32)
    segments = jnp.repeat(jnp.array([1, 2], jnp.int32), jnp.array(lengths))[None]
    rows = {"segments": segments, "positions": segments, "targets": segments, "action_mask": marked}
    rows |= {"logprobs": SAMPLER, "advantages": ADVANTAGES * marked}
    arrays = {key: jnp.asarray(value) for key, value in rows.items()}

    def ours(logprobs):
        return find(recipe).apply(logprobs, arrays, None)

    def theirs(logprobs):
        settings = {k: jnp.full((1, 8), v, jnp.float32) for k, v in LOSSES[name].settings.items()}
        x = arrays | settings | {"sequence_ratio_mask": arrays["action_mask"]}

        def mean(values, marks):
            parts = jnp.split(values * marks, [lengths[0]], axis=1)
            of = jnp.split(marks, [lengths[0]], axis=1)
            means = [jnp.full_like(p, p.sum() / m.sum()) for p, m in zip(parts, of, strict=True)]
            return jnp.concatenate(means, axis=1)

        return LOSSES[name].apply(logprobs, x, mean) * marked

    for of in (lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())):
        given = jnp.asarray(LOGPROBS)
        np.testing.assert_allclose(of(ours)(given), of(theirs)(given), rtol=1e-5, atol=1e-6)


def test_recipes_that_read_more_are_refused_by_name():
    for text, message in (
        ("jaxrl.clip_cov", "reads more than a sequence's log-probs"),
        ("jaxrl.grpo kl=0.001", "reads more than a sequence's log-probs"),
        ("jaxrl.cispo hight=4", "did you mean high"),
    ):
        with pytest.raises(ValueError, match=message):
            find(text)
