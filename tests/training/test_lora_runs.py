"""Learning adapters: the step against one by hand, frozen parameters, meshes, dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from jaxrl.core.casts import cast
from jaxrl.core.compiled import jit
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import PRESETS as PRECISIONS, Precision
from jaxrl.learner.policy import make_learner
from jaxrl.learner.update import checkpoint_view, from_checkpoint
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.objectives import objective
from jaxrl.losses.surrogates import reinforce
from jaxrl.models import lora, spec
from jaxrl.models.model import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests import tiny

FP32 = PRECISIONS["fp32"]
RATE = 0.1
CONFIG = dataclasses.replace(tiny.CONFIG, tied=False)
MOMENTUM = optax.sgd(RATE, momentum=0.9)


def specs():
    declared = decoder(CONFIG).specs
    adapters = lora.adapter_specs(declared, rank=4, targets=["*_proj", "lm_head"])
    return lora.Adapted(adapters, declared, alpha=8.0)


def adapted(*, seed=0, kept=FP32.wire):
    """Adapters with both factors random: where B is 0, so are A's gradients."""
    some = spec.init(specs().adapters, jax.random.key(seed), dtype=FP32.params)
    keys = iter(jax.random.split(jax.random.key(seed + 1), 99))
    some = jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape), some)
    return lora.Adapted(some, cast(tiny.params(config=CONFIG), kept), alpha=8.0)


def minibatch():
    samples = tiny.rollouts(16, longest=16)
    advantages = list(np.random.default_rng(0).normal(size=16))
    shape = MinibatchShape(row_length=16, rows_per_microbatch=8, packed=False)
    return pack_minibatch(samples, advantages, shape=shape)


@functools.cache
def on_one_device():
    """The learner, and its state and metrics after one step."""
    learner = make(MOMENTUM)
    return learner, *jax.jit(learner.step)(learner.init(adapted()), minibatch())


def make(optimizer, *, precision=FP32, layout=None):
    return make_learner(
        decoder(CONFIG, layout=layout),
        objective(reinforce(), token_mean),
        optimizer=optimizer,
        precision=precision,
        param_shardings=None if layout is None else layout.tree(specs()),
    )


def test_adapter_step_equals_the_one_by_hand():
    """The gradient of W + s B A, by the chain rule from the gradient of all parameters."""
    params, (_, state, metrics) = adapted(), on_one_device()
    plain = make(optax.sgd(1.0))
    merged = lora.merge(params)
    whole, expected = jax.jit(plain.step)(plain.init(merged), minibatch())
    assert float(metrics["loss"].total) == pytest.approx(float(expected["loss"].total), rel=1e-5)
    adapters, trained, before, after = (
        traverse_util.flatten_dict(tree, sep="/")
        for tree in (params.adapters, state.params.adapters, merged, whole.params)
    )
    for name, a in adapters.items():
        if not name.endswith("_a"):
            continue
        matrix = name.removesuffix("_a")
        b = adapters[f"{matrix}_b"]
        slope = before[matrix] - after[matrix]  # dL/dW
        by_hand = {
            name: a - RATE * 2.0 * jnp.einsum("...or,...oi->...ri", b, slope),
            f"{matrix}_b": b - RATE * 2.0 * jnp.einsum("...oi,...ri->...or", slope, a),
        }
        for key, value in by_hand.items():
            moved = np.asarray(trained[key] - adapters[key])
            assert np.abs(moved).max() > 1e-5
            np.testing.assert_allclose(moved, value - adapters[key], rtol=2e-3, atol=3e-7)
    jax.tree.map(np.testing.assert_array_equal, state.params.frozen, params.frozen)


def test_frozen_parameters_have_no_state():
    precision = PRECISIONS["bf16_master"]
    shapes = lora.abstract(specs(), trained=precision.params, kept=precision.wire)
    state = jax.eval_shape(make(optax.adam(1e-3), precision=precision).init, shapes)
    assert {x.dtype for x in jax.tree.leaves(state.params.frozen)} == {precision.wire}
    assert {x.dtype for x in jax.tree.leaves(state.params.adapters)} == {precision.params}
    trained = sum(x.size for x in jax.tree.leaves(state.params.adapters))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * trained + 1
    kept = checkpoint_view(state)
    assert sum(x.size for x in jax.tree.leaves(kept.params)) == trained
    assert from_checkpoint(kept, like=state) == state


def test_a_reference_scores_as_the_learner_with_the_same_adapters():
    """Bit for bit, also where the learner merges adapters, which rounds W + s B A alone."""
    precision = Precision.parse("bf16_master,sums=fixed")
    params, score = adapted(kept=precision.wire), jit(make(MOMENTUM, precision=precision).score)
    reference = lora.with_trainable(params, lora.as_reference(params, precision))
    assert_equal = np.testing.assert_array_equal
    assert_equal(score(reference, minibatch()), score(params, minibatch()))


def test_mesh_changes_adapters_by_rounding_only():
    layout = Layout(make_mesh(data=2, fsdp=2, tensor=2), PRESETS["fsdp_tensor"])
    params, batch = adapted(), minibatch()
    alone, one, _ = on_one_device()
    scores, _ = jax.jit(alone.shadow_scores)(one.params, batch)
    learner = make(MOMENTUM, layout=layout)
    params = jax.device_put(params, layout.tree(specs()))
    shardings = layout.state(jax.eval_shape(learner.init, params), lora.declared(specs()))
    # The moments of an adapter lie where the adapter lies, and that is not everywhere.
    moments = shardings.opt_state[0].trace["layers"]
    assert moments == shardings.params.adapters["layers"]
    assert not moments["gate_a"].is_fully_replicated
    state = jax.jit(learner.init, out_shardings=shardings)(params)
    rows = jax.tree.map(
        lambda x: layout.batch(("batch", "length")) if x.ndim == 2 else layout.replicated, batch
    )
    batch = jax.device_put(batch, rows)
    step = jax.jit(learner.step, donate_argnums=0, out_shardings=(shardings, None))
    state, _ = step(state, batch)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    jax.tree.map(close, state.params.adapters, one.params.adapters)
    jax.tree.map(np.testing.assert_array_equal, state.params.frozen, one.params.frozen)
    close(jax.jit(learner.shadow_scores)(state.params, batch)[0], scores)


def test_a_head_beside_a_tied_embedding_has_its_sharding():
    """On a mesh, wherever adapters are merged: in the shadow, and in all with fixed sums."""
    layout = Layout(make_mesh(data=2, devices=jax.devices()[:2]), PRESETS["fsdp"])
    declared = decoder(tiny.CONFIG, layout=layout).specs
    own = lora.adapter_specs(declared, rank=4, targets=["lm_head"])
    tied = lora.Adapted(own, declared, alpha=8.0)
    learner = make_learner(
        decoder(tiny.CONFIG, layout=layout),
        objective(reinforce(), token_mean),
        optimizer=MOMENTUM,
        precision="fp32,sums=fixed",
        param_shardings=layout.tree(tied),
    )
    shapes = lora.abstract(tied, trained=FP32.params, kept=FP32.wire)
    state = jax.eval_shape(learner.init, shapes)
    jax.eval_shape(learner.shadow_scores, shapes, minibatch())
    assert jax.eval_shape(learner.step, state, minibatch())[0] == state
    merged = jax.eval_shape(lora.merge, shapes)
    shardings = lora.merged_shardings(layout.tree(tied))
    assert jax.tree.structure(shardings) == jax.tree.structure(merged)
    assert shardings["head"] == shardings["embed"]
