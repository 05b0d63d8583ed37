import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.packing import pack
from jaxrl.losses.mismatch import mismatch
from tests import tiny


def test_worked_example_and_gradient():
    batch = pack(tiny.rollouts(1), [0.0], rows=[[0]], row_length=12)
    shape = batch.tokens.shape
    sampler = jnp.full(shape, -1.0).at[0, 0].set(jnp.nan)
    mask = jnp.zeros(shape, bool).at[0, :3].set(True)
    batch = batch.replace(sampler_logprobs=sampler, action_mask=mask)
    learner = jnp.full(shape, jnp.nan).at[0, 1].set(-1.0 + jnp.log(2.0)).at[0, 2].set(-1.5)
    found = {name: float(m.value) for name, m in mismatch(learner, batch).items()}
    d, w = np.array([np.log(2), -0.5]), np.array([2, np.exp(-0.5)])
    assert found == pytest.approx(
        {
            "mismatch/kl": -d.mean(),
            "mismatch/k3_kl": (w - d - 1).mean(),
            "mismatch/chi2": (w**2).mean() - 1,
            "mismatch/token_mult_error": np.exp(abs(d)).mean(),
            "mismatch/prob_diff": abs(np.exp(d - 1) - np.exp(-1)).mean(),
        },
        rel=1e-5,
    )

    def total(x):
        return sum(m.value for m in mismatch(x, batch).values())

    assert not np.asarray(jax.grad(total)(jnp.full(shape, -2.0))).any()
