"""Tiny random checkpoints of every family, made by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
YARN_AND_NONE = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
MINISTRAL3 = YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 0.6,
    "rope_parameters": YARN | {"truncate": False},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
PERIODS = [*KINDS, *KINDS[1:]]  # two, and a layer
# Groups of two, of which two are chosen; one dense layer before those with experts.
CORRECTED = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
# Two periods of a linear layer and one with attention.
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "partial_rotary_factor": 0.5,
}
TEMPERATURES = {"mscale": 0.7, "mscale_all_dim": 1.0}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_windows": (transformers.Qwen2Config, WINDOWS),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3_yarn": (transformers.Qwen3Config, {"head_dim": 16, "rope_parameters": YARN}),
    "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 6, "head_dim": 12}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_raw": (transformers.Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": False}),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 20},
    ),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, DELTA | {"head_dim": 16}),
    "qwen3_5_moe_text": (
        transformers.Qwen3_5MoeTextConfig,
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 20},
    ),
    "gemma2": (transformers.Gemma2Config, GEMMA | CAPS),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {**GEMMA, "num_hidden_layers": 5, "layer_types": PERIODS, "rope_parameters": TWO_ROPES}
        | {"final_logit_softcapping": 3.0},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 6, "head_dim": 12}),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        CORRECTED | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        CORRECTED | LATENT | {"q_lora_rank": 20, "rope_parameters": YARN | TEMPERATURES},
    ),
    "deepseek_v3_direct": (
        transformers.DeepseekV3Config,
        CORRECTED | LATENT | {"q_lora_rank": None, "rope_interleave": False},
    ),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (
        transformers.Olmo3Config,
        {"sliding_window": 6, "layer_types": KINDS, "rope_parameters": YARN_AND_NONE},
    ),
    "ministral": (
        transformers.MinistralConfig,
        {"sliding_window": 6, "layer_types": KINDS, "head_dim": 12},
    ),
    "ministral3": (transformers.Ministral3Config, {"head_dim": 12, "rope_parameters": MINISTRAL3}),
    "phi3": (transformers.Phi3Config, {"sliding_window": 6}),
    "gpt_oss": (transformers.GptOssConfig, GPT_OSS),
}


def reference(family: str, *, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A model in which every norm and bias matters."""
    make, settings = FAMILIES[family]
    config = make(**SIZES | settings, tie_word_embeddings=tied)
    plus_one = family.startswith(("gemma", "qwen3_next", "qwen3_5"))  # multiply by 1 + weight
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.ndim == 1 else 0.15))
            if "norm" in name and not (plus_one and "linear_attn" not in name):
                weight.add_(1.0)
        for name, bias in model.named_buffers():
            if "correction_bias" in name:
                bias.copy_(torch.randn_like(bias) * 0.3)
    return model.to(dtype).eval()


def classifier(family: str, *, tied: bool, labels: int = 1, dtype: torch.dtype) -> Any:
    """A reward model: the body of `reference` and a random score."""
    language_model = reference(family, tied=tied)
    config = language_model.config
    config.num_labels = labels
    make = transformers.AutoModelForSequenceClassification.from_config
    model = make(config, attn_implementation="eager")
    with torch.no_grad():
        model.model.load_state_dict(language_model.model.state_dict())
        model.score.weight.copy_(torch.randn_like(model.score.weight))
    return model.to(dtype).eval()


def checkpoint(directory: Path, family: str, *, tied: bool, **options: Any) -> Any:
    """Saves `reference` and returns it; options are those of `save_pretrained`."""
    dtype = options.pop("dtype", torch.float32)
    model = reference(family, tied=tied, dtype=dtype)
    model.save_pretrained(directory, **options)
    return model


def assert_same_model(found: Any, expected: Any) -> None:
    """Two models have the same weights, bit for bit, and compute the same logits.

    Logits may differ in their last bits: torch sums in an order that depends on where in memory an
    array begins.
    """
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (weight.dtype, weight.shape), name
        assert torch.equal(_bits(ours[name]), _bits(weight)), name
    tokens = torch.arange(2, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(tokens).logits, expected(tokens).logits)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)
