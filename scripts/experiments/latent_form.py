"""Compares two forms of multi-head latent attention: log-probs of the same tokens, weights, dtypes.

    python scripts/experiments/latent_form.py

The expanded form makes keys and values of all heads from the narrow projection, as training does.
The absorbed form multiplies the queries by the keys' matrix instead, so that a cache needs to hold
the narrow projection only (arXiv:2405.04434, section 2.1). They differ in what they round.
"""

import argparse
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.precision import Precision, jit, parse, sampler_precision
from jaxrl.models import block, latent
from jaxrl.models.attention import softmax_product
from jaxrl.models.decoder import Model, decoder
from jaxrl.models.hf_config import from_hf_config
from jaxrl.models.layers import project, rms_norm
from jaxrl.models.products import product
from jaxrl.models.spec import init

CONFIG = from_hf_config(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 2,  # every token has both: rounding does not choose others
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "initializer_range": 0.12,  # logits as far apart as a trained model's
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 1e4,
        "eos_token_id": 1,
        "hidden_act": "silu",
    }
)
narrow = {}  # the projection and the matrix behind it, of the layer that is traced


def project_latent(x, layer, table, *, context):
    low = project(x, layer, "kv_down", precision=context.precision)[..., : CONFIG.latent.kv_rank]
    low = rms_norm(low, layer["kv_down_norm"], eps=1e-6, precision=context.precision)
    narrow.update(low=low, up=layer["kv_up"])
    return latent.project_latent(x, layer, table, context=context)


def absorbed(q, k, v, segments, *, scoring, precision):
    """Attends over rows of one segment: [B, T, H, hd] -> [B, T, H, vd]."""
    rope, low = CONFIG.latent.rope_dim, narrow["low"]
    (batch, length, heads, dim), kept = q.shape, CONFIG.head_dim - CONFIG.latent.rope_dim
    to_keys, to_values = jnp.split(narrow["up"].reshape(heads, -1, low.shape[-1]), [kept], axis=1)

    def of_heads(x, matrix):  # [B, H, T, in] by [H, in, out]
        x = x.transpose(1, 0, 2, 3).reshape(heads, batch * length, -1)
        y = product(x, matrix, contract=(2, 1), batch=(0,), precision=precision)
        y = y.astype(precision.activations).reshape(heads, batch, length, -1)
        return y.transpose(1, 0, 2, 3)

    q = q.transpose(0, 2, 1, 3)
    q = jnp.concatenate([q[..., :rope], of_heads(q[..., rope:], to_keys)], axis=-1)[:, None]
    keys = jnp.concatenate([k[:, :, 0, :rope], low], axis=-1)[:, None]
    scores = product(q, keys, contract=(4, 3), batch=(0, 1), precision=precision)
    scores = scoring.scores(scores, head_dim=dim)
    seen = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
    scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    out, _ = softmax_product(scores, low[:, None], None, precision=precision)
    return of_heads(out[:, 0], to_values.swapaxes(1, 2)).transpose(0, 2, 1, 3)


def logprobs(model: Model, params, tokens: np.ndarray, precision: Precision) -> np.ndarray:
    def run(params):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        ones = jnp.ones_like(positions)
        hidden = model.hidden(params, tokens, positions, ones, precision=precision)[:, :-1]
        head = model.unembedding(params)
        logits = product(hidden, head, contract=(2, 1), precision=precision)
        found = jax.nn.log_softmax(logits.astype(precision.logits))
        return jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]

    return np.asarray(jit(run)(params))


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    params = init(decoder(CONFIG).specs, jax.random.key(0), dtype=jnp.dtype(jnp.float32))
    tokens = np.random.default_rng(0).integers(2, CONFIG.vocab_size, (16, 128)).astype(np.int32)
    with mock.patch.object(block, "project_latent", project_latent):
        for name in ("fp32", "bf16_master", "fp16_master"):
            precision = sampler_precision(parse(name))
            served = jax.tree.map(lambda x, to=precision.compute: x.astype(to), params)
            one, other = (
                logprobs(model, served, tokens, precision)
                for model in (decoder(CONFIG), decoder(CONFIG, attend=absorbed))
            )
            equal = 100 * np.mean(one == other)
            print(f"{name}: standard deviation {np.std(one - other):.2g}, {equal:.0f} % equal")


if __name__ == "__main__":
    main()
