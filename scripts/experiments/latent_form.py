"""Compares two forms of multi-head latent attention: log-probs of the same tokens, weights, dtypes.

    python scripts/experiments/latent_form.py

The expanded form makes keys and values of all heads from the narrow projection, as training does.
The absorbed form multiplies the queries by the keys' matrix instead, so that a cache needs to hold
the narrow projection only (arXiv:2405.04434, section 2.1). They differ in what they round.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from runs import plain_parser

from jaxrl.core.precision import Precision, jit, parse, sampler_precision
from jaxrl.huggingface.config.convert import from_hf_config
from jaxrl.models.logprobs import token_logprobs
from jaxrl.models.model import Model, decoder
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


def logprobs(model: Model, params, tokens: np.ndarray, precision: Precision) -> np.ndarray:
    def run(params):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        ones = jnp.ones_like(positions)
        hidden = model.hidden(params, tokens, positions, ones, precision=precision)
        scored = (model.head(params), jnp.asarray(tokens), positions > 0)
        return token_logprobs(hidden, *scored, precision=precision)[:, 1:]

    return np.asarray(jit(run)(params))


def main() -> None:
    plain_parser(__doc__).parse_args()
    params = init(decoder(CONFIG).specs, jax.random.key(0), dtype=jnp.dtype(jnp.float32))
    tokens = np.random.default_rng(0).integers(2, CONFIG.vocab_size, (16, 128)).astype(np.int32)
    for name in ("fp32", "bf16_master", "fp16_master"):
        precision = sampler_precision(parse(name))
        served = jax.tree.map(lambda x, to=precision.compute: x.astype(to), params)
        one, other = (
            logprobs(decoder(CONFIG), served, tokens, dataclasses.replace(precision, latent=form))
            for form in ("expanded", "absorbed")
        )
        equal = 100 * np.mean(one == other)
        print(f"{name}: standard deviation {np.std(one - other):.2g}, {equal:.0f} % equal")


if __name__ == "__main__":
    main()
