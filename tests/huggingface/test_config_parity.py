"""A config.json that is read means what transformers reads in it; other ones are refused.

More examples, drawn at random:

    JAXRL_MUTATIONS=2500 pytest tests/huggingface/test_config_parity.py
"""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, event, given, note, settings, strategies as st

from jaxrl import huggingface
from jaxrl.core.precision import PRESETS
from jaxrl.models.attention.scores import soft_cap
from jaxrl.models.model import decoder
from tests.models.references import YARN, checkpoint

COUNT = os.environ.get("JAXRL_MUTATIONS")
TOKENS = np.random.default_rng(0).integers(0, 96, (1, 14))

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = [
    None,
    {},
    {"rope_type": "default"},
    {"type": "linear", "factor": 2},
    {"rope_type": "default", "type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 0.5, "rope_theta": 300.0},
    {"rope_theta": 300.0},
    LLAMA3,
    LLAMA3 | {"rope_theta": 300.0},
    LLAMA3 | {"high_freq_factor": 1.0},
    YARN,
    YARN | {"attention_factor": 0.5, "beta_fast": 0.1, "mscale": 0.0},
    YARN | {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"full_attention": {"rope_type": "default", "rope_theta": 300.0}},
    {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 7.0}},
    {"full_attention": YARN | {"truncate": False}},
    {"full_attention": YARN, "sliding_attention": YARN},
    YARN | {"llama_4_scaling_beta": 0.5, "max_position_embeddings": 128},
]
LINEAR = "linear_attention"
KINDS = ["full_attention", "sliding_attention"]
NEW = ["gemma2", "gemma3_text", "mixtral", "smollm3", "olmo2", "olmo3", "ministral3", "phi3"]
NEW += ["glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
# Values that a config.json might have, some of which contradict each other.
SETTINGS = {
    "architectures": [None, [], ["Qwen2ForCausalLM"], ["LlamaForCausalLM"], ["Qwen2Model"]],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", *NEW],
    "sliding_window": [None, -1, 0, 1, 5, 64],
    "use_sliding_window": [False, True, None],
    "max_window_layers": [-1, 0, 2, 28],
    "layer_types": [
        None,
        [*[LINEAR] * 3, KINDS[0]],
        [KINDS[0], *[LINEAR] * 3],
        KINDS[:1] * 3,
        KINDS[1:] * 3,
        [*KINDS, KINDS[0]],
        KINDS,
    ],
    "rope_theta": [None, 0, -1, 300.0, 10_000, 1e30],
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "original_max_position_embeddings": [None, 32, 64],
    "max_position_embeddings": [16, 32],
    "partial_rotary_factor": [None, 0.5, 1.0],
    "num_key_value_heads": [None, 0, 1, 2, 4],
    "num_attention_heads": [2, 8],
    "head_dim": [None, 0, 8, 12, 16],
    "hidden_act": ["silu", "gelu", "swish", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu_pytorch_tanh", None],
    "sliding_window_pattern": [None, 1, 2, 3],
    "rope_local_base_freq": [300.0, 1e4],
    "query_pre_attn_scalar": [None, 8, 24],
    "attn_logit_softcapping": [None, 0, 5.0],
    "final_logit_softcapping": [None, 5.0],
    "use_bidirectional_attention": [None, False, True],
    "no_rope_layers": [None, [1, 1, 0], [1, 0]],
    "no_rope_layer_interval": [1, 2],
    "resid_pdrop": [0.0, 0.1],
    "clip_qkv": [None, 0.1],
    "router_jitter_noise": [0, 0.1],
    "swiglu_alpha": [1.0],
    "swiglu_limit": [0, 0.3],
    "rms_norm_eps": [0, 0.5, -1.0],
    "attention_bias": [None, True, False],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [None, True, False],
    "is_causal": [False, True],
    "norm_topk_prob": [False, True, None],
    "num_experts_per_tok": [0, 1, 3, 7],
    "num_experts": [5, 6],
    "num_local_experts": [5, 6],
    "n_routed_experts": [None, 6, 8],
    "n_group": [1, 3, 4],
    "topk_group": [0, 1, 4],
    "n_shared_experts": [0, 1],
    "first_k_dense_replace": [0, 2, 3],
    "routed_scaling_factor": [0, 0.5],
    "use_qk_norm": [False, True],
    "q_lora_rank": [None, 12],
    "qk_rope_head_dim": [None, 7, 4],
    "v_head_dim": [None, 6],
    "rope_interleave": [True, False],
    "scoring_func": ["sigmoid", "softmax"],
    "full_attention_interval": [1, 2, 3],
    "linear_num_value_heads": [2, 3, 6],
    "linear_num_key_heads": [1, 4],
    "linear_conv_kernel_dim": [1, 2, 4],
    "shared_expert_intermediate_size": [None, 8],
    "num_nextn_predict_layers": [0, 1],
    "mlp_only_layers": [[], [0], [7]],
    "decoder_sparse_step": [0, 1, 2],
    "pretraining_tp": [1, 2],
    "attention_dropout": [0, 0.0, 0.5],
    "quantization_config": [None, {}],
    "per_layer_config": [None, {"0": {"hidden_size": 16}}],
}
changes = st.lists(
    st.sampled_from(sorted(SETTINGS)).flatmap(
        lambda key: st.tuples(st.just(key), st.sampled_from([*SETTINGS[key], "absent"]))
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Checkpoints of every family by transformers, and what jaxrl computes for a config of one."""
    found = {}
    old = ("llama3", "mistral", "qwen2", "qwen2_windows", "qwen3", "qwen3_moe")
    new = (
        "gemma2",
        "gemma3",
        "mixtral",
        "smollm3",
        "olmo3",
        "ministral3",
        "phi3",
        "glm4_moe",
        "deepseek_v3",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    )
    for family in (*old, *new):
        directory = tmp_path_factory.mktemp(family)
        checkpoint(directory, family, tied=False)

        @functools.cache
        def logits(config, directory=directory):
            del config
            config, params = huggingface.load(directory, dtype=None)
            model, row = decoder(config), jnp.asarray(TOKENS)
            places = jnp.arange(row.shape[1])[None]
            hidden = jax.jit(functools.partial(model.hidden, precision=PRESETS["fp32"]))
            hidden = hidden(params, row, places, jnp.ones_like(row))
            head = model.head(params)
            return np.asarray(soft_cap(hidden @ head.weights.T, head.cap))

        config = json.loads((directory / "config.json").read_text())
        found[family] = directory, config, logits
    return found


@settings(
    max_examples=int(COUNT or 80),
    derandomize=COUNT is None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_what_is_read_computes_what_transformers_computes(data, originals):
    directory, original, logits = originals[data.draw(st.sampled_from(sorted(originals)))]
    config = original | dict(data.draw(changes))
    config = {key: value for key, value in config.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(config))
    try:
        read = huggingface.load(directory, dtype=None)[0]
    except ValueError:
        event("refused")
        return
    try:
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager"
        )
        with torch.no_grad():
            expected = reference(torch.tensor(TOKENS)).logits.numpy()
    except Exception as error:
        note(f"{type(error).__name__}: {error}")
        event(f"read, but refused by transformers: {type(error).__name__} {str(error)[:80]}")
        return
    event("compared")
    np.testing.assert_allclose(logits(read), expected, atol=2e-4 * np.abs(expected).max())
