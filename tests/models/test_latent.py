"""The absorbed form of multi-head latent attention is the expanded form."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import parse
from jaxrl.models import lora
from jaxrl.models.latent import check_form
from jaxrl.models.model import decoder
from tests import tiny

FORMS = parse("fp32"), parse("fp32,latent=absorbed")
DIRECT = dataclasses.replace(
    tiny.DEEPSEEK, latent=dataclasses.replace(tiny.DEEPSEEK.latent, q_rank=None, interleaved=False)
)
TOKENS = jax.random.randint(jax.random.key(5), (2, 11), 2, tiny.CONFIG.vocab_size)
# Two packed sequences; one and padding.
SEGMENTS = jnp.array([[1] * 4 + [2] * 7, [1] * 9 + [0] * 2])
POSITIONS = jnp.array([[*range(4), *range(7)], [*range(9), 0, 0]])


def adapted(model, base):
    adapters = lora.adapter_specs(model.specs, rank=3, targets=["kv_b_proj", "o_proj"])
    drawn = tiny.drawn(adapters, 0)
    return lora.Adapted(jax.tree.map(lambda x: x + 0.1, drawn), base, alpha=6.0)


@pytest.mark.parametrize(
    ("config", "adapters"),
    [(tiny.DEEPSEEK, False), (DIRECT, False), (tiny.DEEPSEEK, True)],
    ids=["narrow_q", "direct_q", "lora"],
)
def test_both_forms_agree(config, adapters):
    model, params = decoder(config, remat="attention"), tiny.params(config=config)
    if adapters:
        params = adapted(model, params)
    weights = jax.random.normal(jax.random.key(1), (*TOKENS.shape, config.hidden_size))
    weights *= (SEGMENTS > 0)[..., None]

    def loss(trained, precision):
        whole = lora.with_trainable(params, trained)
        return jnp.sum(
            weights * model.hidden(whole, TOKENS, POSITIONS, SEGMENTS, precision=precision)
        )

    (one, expected), (other, found) = (
        jax.jit(jax.value_and_grad(partial(loss, precision=form)))(lora.trainable(params))
        for form in FORMS
    )
    assert max(np.abs(x).max() for x in jax.tree.leaves(jax.device_get(expected))) > 1
    np.testing.assert_allclose(other, one, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected
    )


def test_a_family_without_it_has_no_form():
    check_form(FORMS[1], tiny.DEEPSEEK)
    check_form(FORMS[0], tiny.CONFIG)
    with pytest.raises(
        ValueError, match=r"latent=absorbed is for multi-head.*family qwen3 does not"
    ):
        check_form(FORMS[1], tiny.CONFIG)
