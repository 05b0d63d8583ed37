"""The learner's laws: how a batch is cut into rows and microbatches changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.core.batch import Minibatch
from jaxrl.core.loss_scale import LossScale, LossScaleSpec, dynamic_loss_scale
from jaxrl.core.metrics import Mean, to_floats
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import PRESETS, Precision
from jaxrl.learner.policy import Learner, LearnerState, make_learner
from jaxrl.learner.update import applied_steps, make_update
from jaxrl.losses import (
    clipped,
    grpo,
    kl_cov,
    kl_penalty,
    objective,
    over_anchor,
    over_sampler,
    shadowed,
    surrogate,
    token_mean,
    token_sum,
    with_terms,
    within,
)
from jaxrl.losses.presets import icepop, token_tis
from jaxrl.models.model import decoder
from tests import tiny

FP32 = PRESETS["fp32"]
GRPO = grpo()
EVERYTHING = {  # that depends on the tokens of the whole batch, and on their number
    "top_entropy": 0.5,
    "rejection": within(over_sampler, high=1.5),
    "positive_nll": 0.1,
    "observation_nll": 0.1,
}
ROW = 24


@functools.cache  # a step takes seconds to compile
def learner(
    *, recipe=None, precision: Precision = FP32, optimizer=None, temperature=1.0, config=tiny.CONFIG
) -> Learner:
    built = make_learner(
        decoder(config)._replace(temperature=temperature),
        getattr(recipe or GRPO, "objective", recipe),
        optimizer=optimizer or optax.sgd(1.0),
        precision=precision,
    )
    return built._replace(step=jax.jit(built.step), score=jax.jit(built.score))


def minibatch(count=8, *, rows_per_microbatch, microbatches=4, packed=True, seed=0) -> Minibatch:
    samples = tiny.rollouts(count, seed=seed)
    advantages = list(np.random.default_rng(seed).normal(size=count))
    shape = MinibatchShape(
        row_length=ROW,
        rows_per_microbatch=rows_per_microbatch,
        max_rows=rows_per_microbatch * microbatches,
        packed=packed,
    )
    return pack_minibatch(samples, advantages, shape=shape)


def gradient(one: Learner, batch: Minibatch, *, config=tiny.CONFIG) -> dict:
    """What sgd with learning rate 1 subtracted."""
    state = one.init(tiny.params(config=config))
    after, _ = one.step(state, batch)
    return jax.tree.map(lambda a, b: np.asarray(a - b), state.params, after.params)


def assert_close(a, b, *, rtol):
    for path, x in jax.tree_util.tree_leaves_with_path(a):
        y = b
        for key in path:
            y = y[key.key]
        scale = np.abs(y).max()
        np.testing.assert_allclose(x, y, atol=rtol * scale, rtol=0, err_msg=str(path))


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        (GRPO, tiny.CONFIG),
        (with_terms(GRPO, aggregation=token_sum, entropy=0.1), tiny.CONFIG),
        (with_terms(GRPO, balance=0.1), tiny.MOE),
        (with_terms(kl_cov(share=0.3, ratio=over_anchor), **EVERYTHING), tiny.CONFIG),
    ],
)
def test_packing_microbatching_and_padding_change_no_gradient(recipe, config):
    rows = minibatch(rows_per_microbatch=8, packed=False)
    whole = gradient(learner(recipe=recipe, config=config), rows, config=config)
    assert max(np.abs(x).max() for x in jax.tree.leaves(whole)) > 1e-3
    one = learner(recipe=recipe, config=config)
    for batch in (
        minibatch(rows_per_microbatch=2, microbatches=7, packed=False),
        minibatch(rows_per_microbatch=2, microbatches=7),
    ):
        assert_close(gradient(one, batch, config=config), whole, rtol=2e-5)


def test_balancing_a_dense_model_is_an_error():
    with pytest.raises(ValueError, match="balances experts but the model has none"):
        learner(recipe=with_terms(GRPO, balance=0.1))


def test_metrics_do_not_depend_on_microbatches():
    def metrics(rows, **kwargs):
        one = learner()
        _, found = one.step(one.init(tiny.params()), minibatch(rows_per_microbatch=rows, **kwargs))
        return to_floats(found)

    a, b = metrics(8, packed=False), metrics(2)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


def test_a_rejection_and_a_correction_of_one_name_both_report():
    """IcePop leaves the batch, and the rest is truncated: two shares that are out of bounds."""
    recipe = with_terms(grpo(ratio=over_anchor), correction=token_tis, rejection=icepop)
    one = make_learner(decoder(tiny.CONFIG), recipe.objective, optimizer=optax.sgd(1.0))
    state, batch = one.init(tiny.params()), minibatch(rows_per_microbatch=2)
    _, metrics = jax.eval_shape(one.step, state, batch)
    names = {f"correction/{name}" for name in ("mean", "missing", "outside")}
    assert names | {f"batch/{name}" for name in names} <= metrics.keys()


def test_step_compiles_once_for_all_rows():
    one = learner()
    state = one.init(tiny.params())
    programs = set()
    for count in (1, 3, 8):
        one.step(state, minibatch(count, rows_per_microbatch=2))
        programs.add(one.step._cache_size())
    assert len(programs) == 1


def test_a_step_traces_its_loss_once():
    traced = []

    def unclipped(ratio, advantages):
        traced.append(ratio.shape)
        return -ratio * advantages

    one = learner(recipe=objective(surrogate(unclipped, over_sampler), token_mean))
    one.step.trace(one.init(tiny.params()), minibatch(rows_per_microbatch=2))
    assert len(traced) == 1


def test_energies_are_squared_norms_of_gradients_by_the_logits():
    one, params, batch = learner(temperature=0.7), tiny.params(), minibatch(rows_per_microbatch=4)
    found = np.asarray(jax.jit(one.energies)(params, batch))
    model, rows = decoder(tiny.CONFIG), batch.batch
    hidden = model.hidden_of(params, rows, precision=FP32)
    logits = np.asarray(hidden @ model.unembedding(params).T / 0.7, np.float64)[:, :-1]
    p = np.exp(logits - logits.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    chosen = np.eye(p.shape[2])[np.asarray(rows.tokens)[:, 1:]]
    expected = ((chosen - p) ** 2).sum(axis=2)  # d log p / d logits = one-hot - p
    mask = np.asarray(rows.action_mask)
    np.testing.assert_allclose(found[:, 1:][mask[:, 1:]], expected[mask[:, 1:]], rtol=1e-4)
    assert not found[~mask].any()
    assert mask.any()


def test_score_equals_the_steps_logprob():
    one = learner(temperature=0.7)
    batch = minibatch(rows_per_microbatch=2)
    logprobs = one.score(tiny.params(), batch)
    np.testing.assert_array_equal(np.asarray(logprobs)[~np.asarray(batch.batch.action_mask)], 0)
    # With the sampler's log-probs equal to the score, every ratio is 1.
    on_policy = batch.replace(batch=batch.batch.replace(sampler_logprobs=logprobs))
    _, metrics = one.step(one.init(tiny.params()), on_policy)
    assert to_floats(metrics)["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert to_floats(metrics)["ratio/kl"] == pytest.approx(0, abs=1e-6)


def test_anchor_defaults_to_the_learner_itself():
    recipe = grpo(ratio=over_anchor)
    one = learner(recipe=recipe)
    batch = minibatch(rows_per_microbatch=2)
    given = batch.replace(anchor=one.score(tiny.params(), batch))
    assert_close(gradient(one, batch), gradient(one, given), rtol=1e-5)


def test_bypass_and_decoupled_agree_over_several_updates():
    """With the sampler's log-probs those of the weights that sampled, the anchor computed once
    before the first of three updates is the sampler: the two wirings take the same steps."""
    bypass, decoupled = (learner(recipe=grpo(ratio=r)) for r in (over_sampler, over_anchor))
    batch = minibatch(rows_per_microbatch=2)
    sampled = bypass.score(tiny.params(), batch)
    batch = batch.replace(batch=batch.batch.replace(sampler_logprobs=sampled))
    ends = []
    for one, given in ((bypass, batch), (decoupled, batch.replace(anchor=sampled))):
        state = one.init(tiny.params())
        for _ in range(3):
            state, metrics = one.step(state, given)
        assert to_floats(metrics)["ratio/kl"] > 1e-3  # the policy has moved
        ends.append(state.params)
    assert_close(*ends, rtol=1e-6)


def test_missing_reference_is_an_error():
    one = learner(recipe=objective(kl_penalty(), token_mean))
    with pytest.raises(ValueError, match="KL coefficient to 0"):
        one.step(one.init(tiny.params()), minibatch(rows_per_microbatch=2))


def test_shadowed_ratio_has_the_samplers_value():
    """The clip of a shadowed ratio sees the sampler's dtypes; unmoved weights are never clipped."""
    precision = dataclasses.replace(
        FP32, wire=jnp.dtype(jnp.bfloat16), sampler=jnp.dtype(jnp.bfloat16)
    )
    served = learner(precision=PRESETS["bf16"]).score(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params()),
        batch := minibatch(rows_per_microbatch=2),
    )
    batch = batch.replace(batch=batch.batch.replace(sampler_logprobs=served))

    def deviation(ratio):
        one = learner(precision=precision, recipe=grpo(ratio=ratio))
        _, metrics = one.step(one.init(tiny.params()), batch)
        return to_floats(metrics)["ratio/kl"]

    assert deviation(shadowed) < 1e-9 < 1e-7 < deviation(over_sampler)


def test_indivisible_rows_are_an_error():
    one, batch = learner(), minibatch(rows_per_microbatch=2).replace(rows_per_microbatch=3)
    state = one.init(tiny.params())
    for use in (lambda: one.step(state, batch), lambda: one.score(state.params, batch)):
        with pytest.raises(ValueError, match="8 rows does not divide into microbatches of 3"):
            use()


@pytest.mark.parametrize("scale", [2.0**10, 2.0**-10])
def test_loss_scale_cancels(scale):
    batch = minibatch(rows_per_microbatch=2)
    precision = dataclasses.replace(FP32, loss_scale=LossScaleSpec(initial=scale, floor=2.0**-20))
    assert_close(
        gradient(learner(precision=precision), batch), gradient(learner(), batch), rtol=1e-5
    )


def test_into_overflow_and_back():
    """From far too large a scale: skipped and halved until gradients are finite, then up again."""
    precision = dataclasses.replace(
        PRESETS["fp16_master"], loss_scale=dynamic_loss_scale(2.0**60, interval=2)
    )
    one = learner(precision=precision, optimizer=optax.adam(1e-3))
    batch = minibatch(rows_per_microbatch=2)
    state: LearnerState = one.init(tiny.params())
    scale, finite = 2.0**60, []
    for i in range(60):
        after, metrics = one.step(state, batch)
        numbers = to_floats(metrics)
        assert int(after.step) == i + 1
        assert numbers["loss_scale"] == scale
        finite.append(int(after.loss_scale.skipped) == int(state.loss_scale.skipped))
        assert numbers["skipped_steps"] == finite.count(False)
        assert applied_steps(after) == optax.tree.get(after.opt_state, "count")
        if finite[-1]:
            assert np.isfinite(numbers["grad_norm"])
            moved = jax.tree.map(lambda a, b: (a != b).any(), after.params, state.params)
            assert any(jax.tree.leaves(moved))
            scale *= 2 if int(after.loss_scale.good_steps) == 0 else 1
        else:
            assert_equal(after.params, state.params)
            assert_equal(after.opt_state, state.opt_state)
            scale /= 2
        assert after.loss_scale.scale == scale
        state = after
    first = finite.index(True)
    assert 30 < first < 55
    assert finite[first + 1]  # two finite steps double the scale,
    assert False in finite[first:]  # which overflows again


# No clip: a token at its edge would be on another side in another precision.
NO_CLIP = objective(clipped(over_sampler, low=1.0, high=1e9), token_mean)


def test_loss_scale_prevents_f16_underflow():
    """Where unscaled f16 keeps nothing, scaled f16 has f32's gradients to its own rounding."""
    tiny_loss = 2.0**-40
    batch = minibatch(rows_per_microbatch=2)
    exact = gradient(learner(recipe=NO_CLIP), batch)
    small = batch.replace(batch=batch.batch.replace(advantages=batch.batch.advantages * tiny_loss))
    precision = dataclasses.replace(
        PRESETS["fp16_master"], loss_scale=LossScaleSpec(initial=2.0**48)
    )
    # The learning rate makes up for the loss, so that the difference of parameters shows it.
    one = learner(recipe=NO_CLIP, precision=precision, optimizer=optax.sgd(1 / tiny_loss))
    assert_close(gradient(one, small), exact, rtol=0.012)
    unscaled = LossScale(scale=jnp.float32(1), good_steps=jnp.int32(0), skipped=jnp.int32(0))
    state = one.init(tiny.params()).replace(loss_scale=unscaled)
    after, metrics = one.step(state, small)
    assert to_floats(metrics)["grad_norm"] == 0
    assert_equal(after.params, state.params)


@pytest.mark.parametrize(("name", "rtol"), [("bf16_master", 0.06), ("fp16_master", 0.012)])
def test_half_precision_gradients_agree_with_f32(name, rtol):
    batch = minibatch(rows_per_microbatch=2)
    exact = gradient(learner(recipe=NO_CLIP), batch)
    precision = dataclasses.replace(PRESETS[name], loss_scale=LossScaleSpec(initial=2.0**8))
    assert_close(gradient(learner(recipe=NO_CLIP, precision=precision), batch), exact, rtol=rtol)


def test_a_loss_cannot_replace_the_learners_metrics():
    def total(params, rows):
        return jnp.float32(0), {"grad_norm": Mean(jnp.float32(0), jnp.float32(1))}

    update = make_update(optimizer=optax.sgd(1.0), precision=FP32)
    state, batch = update.init(tiny.params()), minibatch(rows_per_microbatch=16)
    with pytest.raises(ValueError, match="metrics 'grad_norm', which are names of the learner's"):
        update.step(state, batch, total, denominator=jnp.float32(1))


def test_state_keeps_the_dtypes_of_the_policy():
    precision = dataclasses.replace(PRESETS["bf16"], moments=jnp.dtype(jnp.bfloat16))
    one = learner(precision=precision, optimizer=optax.adam(1e-3))
    state = one.init(tiny.params())
    after, _ = one.step(state, minibatch(rows_per_microbatch=2))
    for x in (state, after):
        floats = [
            leaf.dtype
            for leaf in jax.tree.leaves((x.params, x.opt_state))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        assert set(floats) == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, after)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
