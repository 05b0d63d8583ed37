"""Truncated sampling: the learner normalises over the tokens that the sampler kept."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl
from jaxrl.core.batch import Rollout, from_json, to_json
from jaxrl.core.hosts import Hosts
from jaxrl.core.kept import decode, encode, most_kept
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import SHARED, MinibatchShape, pack, pack_minibatch, unpack
from jaxrl.core.precision import Precision
from jaxrl.environments.episodes.base import EpisodeLimits, Step
from jaxrl.environments.episodes.episode import EpisodeBuilder
from jaxrl.environments.episodes.single_turn import as_rollout
from jaxrl.learner.policy import make_learner
from jaxrl.losses import objective, over_sampler, reinforce, score_centering, token_sum, unclipped
from jaxrl.models.model import decoder
from jaxrl.sampling.base import Completion, SamplingParams
from jaxrl.sampling.embedded.one_at_a_time import OneAtATime
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sampling.multihost import MultihostSampler
from tests import tiny

TEMPERATURE, VOCAB = 0.8, tiny.CONFIG.vocab_size
MODEL = decoder(tiny.CONFIG)._replace(temperature=TEMPERATURE)
PROMPTS = [np.arange(2, 2 + n, dtype=np.int32) * 7 % 62 for n in (3, 9)]
ASKED = SamplingParams(
    max_tokens=14, temperature=TEMPERATURE, top_p=0.8, min_p=0.02, top_k=20, seed=3
)
SHAPE = MinibatchShape(row_length=48, rows_per_microbatch=2, max_rows=8)
ADVANTAGES = [1.0, -0.5, 2.0, 0.3, -1.0, 0.7, 1.5, -2.0]


@pytest.fixture(scope="module")
def drawn() -> list[Rollout]:
    sampler = EmbeddedSampler(MODEL, tiny.params(), record_kept=True)
    found = sampler.sample(PROMPTS, ASKED, group_size=4)
    return [as_rollout(one, PROMPTS[one.prompt_index], group=one.prompt_index) for one in found]


def minibatch(rollouts, **changes: Any):
    shape = MinibatchShape(**{**vars(SHAPE), **changes})
    return shape, pack_minibatch(rollouts, ADVANTAGES, shape=shape)


def learner(loss=None, *, precision: str = "fp32"):
    loss = unclipped(over_sampler) if loss is None else loss
    plain = optax.sgd(1.0)
    return make_learner(
        MODEL, objective(loss, token_sum), optimizer=plain, precision=Precision.of(precision)
    )


@jax.jit
def kept_logprobs(params, batch) -> jax.Array:
    """All log-probs over the kept tokens, f32[B, T, V]; -inf for the others."""
    hidden = MODEL.hidden_of(params, batch, precision=Precision.of("fp32"))
    head = MODEL.unembedding(params)
    logits = jnp.einsum("btd,vd->btv", hidden, head, precision="highest") / TEMPERATURE
    ids = decode(batch.kept, VOCAB)
    within = jnp.any(ids[..., None] == jnp.arange(VOCAB).reshape(1, 1, 1, -1), axis=-2)
    return jax.nn.log_softmax(jnp.where(within, jnp.roll(logits, 1, axis=1), -jnp.inf))


def test_sampler_names_the_tokens_that_it_kept(drawn):
    """By sorting the learner's own probabilities."""
    params, sizes = tiny.params(), []
    rows = pack(drawn, [0.0] * 8, rows=[[i] for i in range(8)], row_length=SHAPE.row_length)
    hidden = jax.jit(MODEL.hidden_of, static_argnames="precision")(
        params, rows, precision=Precision.of("fp32")
    )
    head = np.asarray(MODEL.unembedding(params), np.float64)
    for one, states in zip(drawn, np.asarray(hidden, np.float64), strict=True):
        logits = states @ head.T / TEMPERATURE
        assert one.kept.shape == (len(one.completion), 32)
        for t, record in enumerate(one.kept):
            p = np.exp(logits[len(one.prompt) + t - 1])
            order = np.argsort(-p)
            order = order[p[order] >= 0.02 * p.max()][:20]
            share = np.cumsum(p[order]) / p[order].sum()
            expected = order[: np.searchsorted(share, 0.8) + 1]
            found = set(decode(jnp.asarray(record), VOCAB).tolist())
            assert found == set(expected.tolist())
            logprob = np.log(p[one.completion[t]] / p[expected].sum())
            assert one.logprobs[t] == pytest.approx(logprob, abs=2e-5)
            sizes.append(len(found))
    assert len(set(sizes)) > 3


def test_learner_scores_the_sampled_distribution(drawn):
    shape, batch = minibatch(drawn)
    found = unpack(np.asarray(jax.jit(learner().score)(tiny.params(), batch)), drawn, shape=shape)
    for mine, one in zip(found, drawn, strict=True):
        np.testing.assert_allclose(mine, one.logprobs, atol=2e-5)
    _, entropies = jax.jit(learner().shadow_scores)(tiny.params(), batch)
    energies = jax.jit(learner().energies)(tiny.params(), batch)
    logp = kept_logprobs(tiny.params(), batch.batch)
    p, mask = jnp.exp(logp), np.asarray(batch.batch.action_mask)
    entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0), axis=-1)
    np.testing.assert_allclose(entropies[mask], entropy[mask], atol=2e-5)
    chosen = jnp.take_along_axis(p, batch.batch.tokens[:, :, None], axis=-1)[:, :, 0]
    energy = 1 - 2 * chosen + jnp.sum(p**2, axis=-1)
    np.testing.assert_allclose(energies[mask], energy[mask], atol=2e-5)
    # Of the whole vocabulary they would be smaller: the truncation shows as a change of policy.
    without = [one._replace(kept=None) for one in drawn]
    whole = np.asarray(jax.jit(learner().score)(tiny.params(), minibatch(without)[1]))
    for mine, one in zip(unpack(whole, without, shape=shape), drawn, strict=True):
        assert (one.logprobs - mine).mean() > 0.05


@pytest.mark.parametrize("loss", ["importance", "centred"])
def test_gradient_is_of_the_truncated_policy(drawn, loss):
    """With prompts apart, as in the brute force, and shared."""
    _, batch = minibatch(drawn)

    def brute(params):
        logp = kept_logprobs(params, batch.batch)
        tokens, mask = batch.batch.tokens[:, :, None], batch.batch.action_mask
        taken = jnp.take_along_axis(logp, tokens, axis=-1)[:, :, 0]
        if loss == "importance":
            value = jnp.exp(jnp.where(mask, taken - batch.batch.sampler_logprobs, 0))
        else:
            q = jax.lax.stop_gradient(jnp.exp(logp))
            value = taken - jnp.sum(jnp.where(q > 0, q * logp, 0), axis=-1)
        return -jnp.sum(jnp.where(mask, batch.batch.advantages * value, 0))

    params = tiny.params()
    expected = jax.jit(jax.grad(brute))(params)
    used = unclipped(over_sampler) if loss == "importance" else reinforce() + score_centering()
    one = learner(used)
    for same in (batch, minibatch(drawn, align=SHARED)[1]):
        after, metrics = jax.jit(one.step)(one.init(params), same)
        found = tiny.difference(params, after.params)
        assert tiny.norm(tiny.difference(found, expected)) < 2e-5 * tiny.norm(expected)
        assert abs(to_floats(metrics)["mismatch/kl"]) < 1e-5


def test_a_step_keeps_the_set_while_the_policy_moves(drawn):
    """The set is the sampler's: it does not follow the learner's probabilities."""
    one, (_, batch) = learner(), minibatch(drawn)
    moved = jax.jit(one.step)(one.init(tiny.params()), batch)[0].params
    found = np.asarray(jax.jit(one.score)(moved, batch))
    logp = kept_logprobs(moved, batch.batch)
    expected = np.take_along_axis(np.asarray(logp), np.asarray(batch.batch.tokens)[..., None], -1)
    mask = np.asarray(batch.batch.action_mask)
    np.testing.assert_allclose(found[mask], expected[..., 0][mask], rtol=1e-4, atol=1e-4)


def test_pending_records_survive_a_checkpoint(drawn):
    for one in (drawn[0], drawn[0]._replace(kept=None)):
        again = from_json(json.loads(json.dumps(to_json(one))))
        for name, value in one._asdict().items():
            np.testing.assert_array_equal(getattr(again, name), value)
    with pytest.raises(ValueError, match="rollout 1: kept is None, but others"):
        pack([drawn[0], drawn[1]._replace(kept=None)], [0.0] * 2, rows=[[0], [1]], row_length=48)


def test_episode_keeps_the_records_of_its_turns():
    builder = EpisodeBuilder(np.array([3, 4], np.int32), (0, 0))
    records = encode(np.full((2, most_kept(VOCAB)), 9, np.int32), VOCAB)

    def turn(kept: np.ndarray | None) -> Completion:
        zeros = np.zeros(2, np.float32)
        ends = (np.zeros(2, np.int32), "stop")
        return Completion(0, 0, np.full(2, 9, np.int32), zeros, *ends, kept=kept)

    limits = EpisodeLimits(
        max_prompt_tokens=4, max_tokens=20, max_turns=3, vocab_size=64, timeout=1.0
    )
    builder.add_completion(turn(records))
    assert builder.add_step(Step([8], 0.0, False), limits) is None
    builder.add_completion(turn(records))
    found = builder.build("done", group=0)
    assert found.kept is not None
    np.testing.assert_array_equal(found.kept, [*records, np.zeros(32), *records])
    builder.add_completion(turn(None))
    assert builder.build("done", group=0).kept is None
    assert EpisodeBuilder(PROMPTS[0], (0, 0)).build("error", group=0).kept is None


def test_what_a_record_has_no_room_for_is_refused():
    sampler = EmbeddedSampler(MODEL, tiny.params(), record_kept=True)
    for top_k in (0, 43):
        params = SamplingParams(max_tokens=2, top_p=0.9, top_k=top_k)
        with pytest.raises(ValueError, match=rf"top_k={top_k}: .* at most 42 of 64; set top_k to"):
            sampler.sample(PROMPTS, params, group_size=1)
    whole = next(sampler.sample(PROMPTS, SamplingParams(max_tokens=2), group_size=1))
    assert whole.kept is None
    assert jaxrl.EmbeddedSampler(MODEL, tiny.params()).records_kept is False
    wrapped = OneAtATime(sampler, jax.devices()[0]), MultihostSampler(sampler, Hosts())
    assert [one.records_kept for one in wrapped] == [True, True]
