import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.optimizer import OptimizerConfig
from jaxrl.core.precision import parse


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.996, 0.997, 0.999])
def test_betas_under_which_a_moment_in_bf16_cannot_fall_are_refused(beta):
    """Adam's .999 times any of its numbers but the powers of two rounds back to the number."""
    numbers = np.arange(128, 256, dtype=np.float32) / 128  # all of bf16 from 1 to 2
    falls = (numbers * np.float32(beta)).astype(jnp.bfloat16) < numbers
    chosen = OptimizerConfig(betas=(0.9, beta))
    found = list(chosen.conflicts(parse("bf16_master,moments=bf16"), steps=1))
    assert bool(found) == (not falls.all())
    assert not list(chosen.conflicts(parse("bf16_master"), steps=1))
