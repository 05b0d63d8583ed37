"""Losses of pairs that compare with the whole batch: neither microbatches nor devices matter."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.learner.policy import Learner, make_learner
from jaxrl.losses import objective, preference
from jaxrl.models.model import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests import tiny

LOSSES = {
    "bco": preference.bco(beta=0.5),
    "aot": preference.aot(beta=0.5),
    "aot_unpaired": preference.aot_unpaired(beta=0.5),
}


def learner(loss) -> Learner:
    total = objective(preference.pairwise(loss), preference.pair_mean)
    return make_learner(decoder(tiny.CONFIG), total, optimizer=optax.sgd(1.0))


@functools.cache
def given(rows: int, devices: int):
    """Parameters and a batch. The reference is 0.8 of the log-probs, which no loss changes."""
    shape = MinibatchShape(row_length=48, rows_per_microbatch=rows, max_rows=16, together=2)
    batch = pack_minibatch(tiny.rollouts(32, longest=20), [0.0] * 32, shape=shape)
    params = tiny.params()
    if devices > 1:
        layout = Layout(make_mesh(data=devices), PRESETS["data"])
        across = layout.batch(("batch", "length"))
        batch = jax.tree.map(lambda x: jax.device_put(x, across) if np.ndim(x) else x, batch)
        params = jax.device_put(jax.device_get(params), layout.replicated)
    scores = jax.jit(learner(LOSSES["bco"]).score)(params, batch)
    return params, dataclasses.replace(batch, reference=0.8 * scores)


def gradient(loss, *, rows, devices=1):
    """What sgd with learning rate 1 subtracted."""
    (params, batch), one = given(rows, devices), learner(loss)
    after, _ = jax.jit(one.step)(one.init(params), batch)
    return jax.tree.map(lambda a, b: np.asarray(a - b), tiny.params(), after.params)


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_and_devices_change_nothing(name):
    """Two microbatches on eight devices."""
    whole = gradient(LOSSES[name], rows=16)
    assert max(np.abs(x).max() for x in jax.tree.leaves(whole)) > 1e-3
    found = gradient(LOSSES[name], rows=8, devices=8)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())
