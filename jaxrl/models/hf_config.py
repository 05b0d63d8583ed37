"""Conversion between a Hugging Face config.json and a `DecoderConfig`.

Two formats are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`), which most
checkpoints have, and transformers 5 (`rope_parameters`, `dtype`). A setting that the decoder does
not support is an error that names it; none is ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.models.checkpoint_files import shown, validated
from jaxrl.models.components import ClampedGate, Experts
from jaxrl.models.config_json import ConfigJson, token_ids
from jaxrl.models.experts_json import read_corrected, write_corrected
from jaxrl.models.families import FAMILIES, DecoderConfig, Family
from jaxrl.models.fp8 import is_fp8, read_block
from jaxrl.models.latent_json import read_latent, write_latent
from jaxrl.models.linear_json import read_linear, write_linear
from jaxrl.models.rope_json import read_ropes, write_ropes
from jaxrl.models.windows_json import read_windows, write_windows
from jaxrl.models.wrapped_json import WRAPPERS, unwrap, wrap

# Keys of all families that change the function, with the only values that are supported.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "transformers_weights": (None,),  # names other files than model.safetensors
    # The layers with experts are scanned, so all of them are alike.
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "per_layer_config": (None,),
}


def from_hf_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the content of a config.json of transformers 4 or 5.

    Raises:
      ValueError: if a `model_type`, rope type or other setting is not supported, a key is missing
        or of the wrong type, or keys contradict each other; the message names them.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in WRAPPERS:
        return dataclasses.replace(from_hf_config(unwrap(raw)), wrapped=True)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={shown(model_type)} is not supported; supported are "
            f"{', '.join((*FAMILIES, *WRAPPERS))}"
        )
    family = FAMILIES[model_type]
    if read_block(raw) is not None or (family.packed and _is_mxfp4(raw)):
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    for key, values in (_ONLY | dict(family.only)).items():
        if values and raw.get(key, values[0]) not in values:
            raise ValueError(
                f"{model_type} with {key}={shown(raw[key])} is not supported; only {values[0]!r} is"
            )
    c = validated(ConfigJson, {**family.defaults, **raw})
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads
    head_dim, latent = c.head_dim or c.hidden_size // heads, None
    if model_type == "deepseek_v3":
        latent, head_dim = read_latent(c)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads} "
            f"and head_dim={head_dim} must be even"
        )
    linear = read_linear(c) if model_type in _LINEAR else None
    windows = () if linear else read_windows(c, family.windows)
    rope, ropes = read_ropes(c, family, windows)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=c.intermediate_size,
        rms_norm_eps=c.rms_norm_eps,
        rope=rope,
        ropes=ropes,
        tied=c.tie_word_embeddings,
        max_positions=c.max_position_embeddings,
        windows=windows,
        linear=linear,
        latent=latent,
        experts=_read_experts(c),
        initializer_range=c.initializer_range,
        scored=_read_scored(c, family),
        bos_id=c.bos_token_id,
        eos_ids=token_ids(c.eos_token_id, vocab_size=c.vocab_size),
        pad_id=c.pad_token_id,
        **(_read_gemma(c) | _read_glm(c) | dict(family.fields)),
    )


def is_quantised(raw: Mapping[str, Any]) -> bool:
    """Tells if the content of a config.json says that weights are in MXFP4 or FP8, see `mxfp4` and
    `fp8`."""
    return _is_mxfp4(raw) or is_fp8(raw)


def _is_mxfp4(raw: Mapping[str, Any]) -> bool:
    quantization = raw.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def to_hf_config(config: DecoderConfig, *, dtype: str) -> dict[str, Any]:
    """Builds the content of a config.json that transformers 4 and 5 and vLLM can read.

    Args:
      config: the decoder's.
      dtype: the weights' dtype by its long name, such as "bfloat16".
    """
    family = FAMILIES[config.model_type]
    activation = _ACTIVATIONS[config.activation]
    content = {
        "architectures": [family.scored_architecture if config.scored else family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": activation,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) != 1 else config.eos_ids[0],
        "pad_token_id": config.pad_id,
        "use_cache": True,
        # transformers 5 and 4 use different keys; each ignores the other's.
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    content |= write_ropes(config, family)
    if config.linear is not None:
        content |= write_linear(config.linear, layers=config.num_layers)
    else:
        content |= write_windows(config.windows, family.windows, layers=config.num_layers)
    content |= _write_experts(config) | _write_gemma(config, activation) | _write_glm(config)
    content |= {"attention_bias": True} if config.o_bias else {}
    if config.latent is not None:
        content |= write_latent(config.latent, head_dim=config.head_dim)
    # Without these keys transformers gives a classifier two labels.
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if config.scored else {}
    return wrap(content) if config.wrapped else content | label


_CORRECTED = ("glm4_moe", "deepseek_v3")
_LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_ROUTED = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "gpt_oss")
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def _read_scored(c: ConfigJson, family: Family) -> bool:
    scored = family.scored_architecture
    if c.architectures and c.architectures not in ([family.architecture], [scored]):
        raise ValueError(
            f"architectures={c.architectures} contradicts model_type={c.model_type!r}; expected "
            f"[{family.architecture!r}] or, for a reward model, [{scored!r}]"
        )
    if c.architectures != [scored]:
        return False
    labels = c.num_labels if c.id2label is None else len(c.id2label)
    if labels != 1:
        key = "num_labels" if c.id2label is None else "id2label"
        raise ValueError(f"a classifier with {labels} labels ({key}); a reward model has one")
    return True


def _read_gemma(c: ConfigJson) -> dict[str, Any]:
    """Returns fields that only the configs of Gemma have."""
    if not c.model_type.startswith("gemma"):
        return {}
    return {
        "query_scalar": c.query_pre_attn_scalar,
        "score_cap": c.attn_logit_softcapping,
        "logit_cap": c.final_logit_softcapping,
    }


def _write_gemma(config: DecoderConfig, activation: str) -> dict[str, Any]:
    if not config.model_type.startswith("gemma"):
        return {}
    return {
        "hidden_activation": activation,
        "query_pre_attn_scalar": config.query_scalar,
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def _read_glm(c: ConfigJson) -> dict[str, Any]:
    """Returns fields that only the configs of GLM have."""
    if c.model_type != "glm4_moe":
        return {}
    return {"qkv_bias": bool(c.attention_bias), "qk_norm": "head" if c.use_qk_norm else None}


def _write_glm(config: DecoderConfig) -> dict[str, Any]:
    if config.model_type != "glm4_moe":
        return {}
    return {"attention_bias": config.qkv_bias, "use_qk_norm": config.qk_norm == "head"}


def _read_experts(c: ConfigJson) -> Experts | None:
    if c.model_type in _CORRECTED:
        return read_corrected(c)
    if c.model_type not in _ROUTED:
        return None
    # All feed-forward networks of these families are experts.
    mixtral, gpt_oss = c.model_type in ("mixtral", "gpt_oss"), c.model_type == "gpt_oss"
    size = c.intermediate_size if mixtral else c.moe_intermediate_size
    count, per_token = c.num_experts, c.num_experts_per_tok
    if None not in (count, c.num_local_experts) and count != c.num_local_experts:
        raise ValueError(
            f"num_experts={count} and num_local_experts={c.num_local_experts} contradict each other"
        )
    count = count or c.num_local_experts
    if count is None or per_token is None or size is None:
        needed = {"num_experts": count, "num_experts_per_tok": per_token}
        missing = [key for key, value in needed.items() if value is None]
        raise ValueError(f"{', '.join(missing) or 'moe_intermediate_size'} is missing")
    if per_token > count:
        raise ValueError(f"num_experts_per_tok={per_token} is more than the {count} experts")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=size,
        renormalise=mixtral or c.norm_topk_prob,
        gated_shared=(c.shared_expert_intermediate_size or 0) if c.model_type in _LINEAR else 0,
        biases=gpt_oss,
        fused=gpt_oss,
        clamp=ClampedGate(alpha=c.swiglu_alpha, limit=c.swiglu_limit) if gpt_oss else None,
    )


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    if experts.corrected:
        return write_corrected(experts)
    content = {"num_local_experts": experts.count, "num_experts_per_tok": experts.per_token}
    if experts.clamp is not None:
        content |= {"swiglu_alpha": experts.clamp.alpha, "swiglu_limit": experts.clamp.limit}
    if config.model_type in ("mixtral", "gpt_oss"):
        return content
    if experts.gated_shared:
        content |= {"shared_expert_intermediate_size": experts.gated_shared}
    return content | {
        "num_experts": experts.count,  # transformers 4
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
