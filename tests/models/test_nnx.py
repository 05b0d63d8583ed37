"""A decoder written as a Flax NNX module, as somebody else would: scored, trained and sampled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrl
from jaxrl.core.precision import PRESETS
from jaxrl.losses import on_policy
from jaxrl.losses.recipes import dapo
from jaxrl.models.nnx import NnxConfig, from_nnx
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from tests import tiny

F32 = PRESETS["fp32"]


class Layer(nnx.Module):
    def __init__(self, size, heads, rngs):
        self.heads = heads
        self.norm = nnx.RMSNorm(size, rngs=rngs)
        self.qkv = nnx.Linear(size, 3 * size, rngs=rngs)
        self.out = nnx.Linear(size, size, rngs=rngs)

    def __call__(self, x, mask):
        q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], self.heads, -1) for a in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return x + self.out(mixed.reshape(x.shape))


class Decoder(nnx.Module):
    """Learned positions, two layers in a list, a tied head, and a state that is no parameter."""

    def __init__(self, vocab, size, rngs, places=128):
        self.tokens = nnx.Embed(vocab, size, rngs=rngs)
        self.places = nnx.Embed(places, size, rngs=rngs)
        self.layers = nnx.List([Layer(size, 4, rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def hidden(self, tokens, positions, mask):
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.dropout(x)

    def __call__(self, tokens):
        order = jnp.arange(tokens.shape[1])
        mask = (order[:, None] >= order[None])[None]
        return self.tokens.attend(self.hidden(tokens, order[None], mask))


def as_model(module, max_positions):
    return from_nnx(
        module,
        lambda module, tokens, positions, mask: module.hidden(tokens, positions, mask),
        unembedding=lambda module: module.tokens.embedding[...],
        max_positions=max_positions,
    )


MODULE = Decoder(64, 32, nnx.Rngs(0))
MODEL, PARAMS = as_model(MODULE, 128)
RECIPE = dapo(ratio=on_policy)
ROLLOUTS = tiny.rollouts(8, longest=20)
ROWS = {"row_length": 48, "rows_per_microbatch": 2}
BATCH = jaxrl.minibatch(ROLLOUTS, RECIPE.advantages, **ROWS)


def learner(optimizer=None, **kwargs):
    sgd = optimizer or optax.sgd(1.0)
    own = {"optimizer": sgd, "precision": F32} | kwargs
    return jaxrl.make_learner(MODEL, RECIPE.objective, **own)


IDS, ACTIONS = np.zeros((2, len(ROLLOUTS), 24), np.int32)
for row, one in enumerate(ROLLOUTS):
    start, end = len(one.prompt), len(one.prompt) + len(one.completion)
    IDS[row, :end] = [*one.prompt, *one.completion]
    ACTIONS[row, start:end] = one.action_mask


def own_logprobs(module):
    """The module's own log-probs f32[N, T] of each rollout, alone in its row."""
    logits = jax.nn.log_softmax(module(jnp.array(IDS)))[:, :-1]
    chosen = jnp.take_along_axis(logits, IDS[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def test_packed_scores_are_the_modules_own():
    scores = np.asarray(jax.jit(learner().score)(PARAMS, BATCH))
    expected = np.asarray(nnx.jit(own_logprobs)(MODULE))[ACTIONS > 0]
    assert BATCH.batch.segments.max() > 1  # several in a row
    found = scores[np.asarray(BATCH.batch.action_mask)]
    np.testing.assert_allclose(np.sort(found), np.sort(expected), atol=2e-5)


def test_step_follows_nnx_gradient():
    """On the policy the ratio is 1, and the gradient is that of advantage times log-prob."""
    made = learner()
    state, metrics = jax.jit(made.step)(made.init(PARAMS), BATCH)
    rewards = np.array([r.reward for r in ROLLOUTS]).reshape(-1, 4)
    spread = rewards.std(1, ddof=1, keepdims=True) + 1e-6
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / spread).reshape(-1, 1)

    def loss(module):
        return -jnp.sum(own_logprobs(module) * (ACTIONS * advantages)) / ACTIONS.sum()

    gradient = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(MODULE))
    stepped = jax.tree.map(lambda p, g: p - g, PARAMS, gradient)
    norm = jaxrl.to_floats(metrics)["grad_norm"]
    assert norm == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-3)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4)  # noqa: E731
    jax.tree.map(close, state.params, stepped)


def test_sharded_parameters_give_the_same_scores():
    shardings = Layout(make_mesh(fsdp=8), RULES["fsdp"]).tree(MODEL.specs)
    cut = jax.device_put(PARAMS, shardings)
    assert len(cut["tokens"]["embedding"].addressable_shards[0].data) == 64 // 8
    one = jax.jit(learner(param_shardings=shardings).score)(cut, BATCH)
    np.testing.assert_allclose(one, jax.jit(learner().score)(PARAMS, BATCH), atol=1e-5)


def test_sampling_without_cache_draws_the_same():
    """Of jaxrl's own decoder, for which there are both."""
    model, params = tiny.model(), tiny.params()
    asked = jaxrl.SamplingParams(max_tokens=20, temperature=0.9, stop=((5,), (7, 8)), seed=4)
    prompts = [r.prompt for r in ROLLOUTS[:3]]

    def sample(model):
        sampler = jaxrl.EmbeddedSampler(model, params, precision=F32, version=3)
        found = sampler.sample(prompts, asked, group_size=3)
        return {(c.prompt_index, c.sample_index): c for c in found}

    cached, whole = sample(model), sample(model._replace(config=NnxConfig(64, 128)))
    assert {c.finish_reason for c in cached.values()} == {"stop", "length"}
    for index, one in cached.items():
        other = whole[index]
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert (other.versions == 3).all()


def test_a_completion_may_fill_the_positions_that_a_module_has():
    module = Decoder(64, 32, nnx.Rngs(0), places=11)
    model, params = as_model(module, 11)
    sampler = jaxrl.EmbeddedSampler(model, params, precision=F32)
    asked = jaxrl.SamplingParams(max_tokens=8)
    (one,) = sampler.sample([np.array([3, 4, 5], np.int32)], asked, group_size=1)
    logits = nnx.jit(lambda module, ids: module(ids))(module, jnp.array([[3, 4, 5, *one.tokens]]))
    expected = jax.nn.log_softmax(logits)[0, np.arange(2, 10), one.tokens]
    np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)


def test_a_module_learns_from_its_own_samples():
    made = learner(optax.adam(0.02))
    step, state = jaxrl.jit(made.step), made.init(PARAMS)
    sampler = jaxrl.EmbeddedSampler(MODEL, PARAMS, precision=F32)
    rewards = []
    for i in range(6):
        params = jaxrl.SamplingParams(max_tokens=8, seed=i)
        found = list(sampler.sample([np.array([3, 4], np.int32)], params, group_size=16))
        rollouts = [
            tiny.rollouts(1)[0]._replace(
                prompt=np.array([3, 4], np.int32),
                completion=c.tokens,
                logprobs=c.logprobs,
                action_mask=np.ones(8, bool),
                version=c.versions,
                reward=float(np.mean(c.tokens < 32)),
            )
            for c in sorted(found, key=lambda c: c.sample_index)
        ]
        # The learner's log-probs of the samples are the sampler's.
        batch = jaxrl.minibatch(rollouts, RECIPE.advantages, **ROWS)
        state, metrics = step(state, batch)
        assert abs(jaxrl.to_floats(metrics)["mismatch/kl"]) < 1e-5
        sampler.load(state.params, version=i + 1)
        rewards.append(np.mean([r.reward for r in rollouts]))
    assert rewards[-1] > rewards[0] + 0.2


def test_shared_prompts_are_refused():
    zeros = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="pack the completions of an NNX module"):
        MODEL.hidden(PARAMS, zeros, zeros, zeros, precision=F32, seen_until=zeros)
