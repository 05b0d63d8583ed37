"""Optimizers by laws: what weight decay takes, and from what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.learner.optimizers import make_optimizer, make_schedule
from jaxrl.models.spec import ParamSpec

SPECS = {
    "embed": ParamSpec((4, 2), ("vocab", "embed"), "embed", 1.0),
    "matrix": ParamSpec((3, 2, 2), ("layers", "mlp", "embed"), "{layer}.matrix", 1.0),
    "norm": ParamSpec((3, 2), ("layers", "embed"), "{layer}.norm", None),
}


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_weight_decay_is_decoupled(name):
    schedule = make_schedule("linear", learning_rate=0.1, warmup_steps=0, total_steps=50)
    optimizer = make_optimizer(
        name, schedule, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, clip_norm=None, specs=SPECS
    )
    params = {key: jnp.ones(spec.shape) for key, spec in SPECS.items()}

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(optax.tree.zeros_like(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=20)
    left = np.prod([1 - float(schedule(i)) * 0.05 for i in range(20)])
    for key, wanted in (("embed", left), ("matrix", left), ("norm", 1.0)):
        np.testing.assert_allclose(params[key], np.full_like(params[key], wanted), rtol=1e-5)
