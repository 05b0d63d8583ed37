"""Model families: conversion between a Hugging Face config.json and a `DecoderConfig`.

Two formats are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`), which most
checkpoints have, and transformers 5 (`rope_parameters`, `dtype`). A setting that the decoder does
not support is an error that names it; none is ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl.models.checkpoint_files import shown, validated
from jaxrl.models.config_json import ConfigJson, read_windows, token_ids
from jaxrl.models.rope import Rope
from jaxrl.models.rope_json import read_rope, write_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of every feed-forward network.

    Attributes:
      count: experts per layer.
      per_token: experts per token.
      intermediate_size: hidden units of one expert.
      renormalise: true if a token's weights are divided by their sum.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that determines the decoder's shapes and function.

    Attributes:
      model_type: Hugging Face's name of the family, one of `FAMILIES`.
      windows: for each layer the number of tokens that a token attends to, including itself; None
        for all. () if no layer has a window.
      intermediate_size: hidden units of the feed-forward networks; kept but unused with experts.
      experts: None for a dense decoder.
      scored: true for a reward model, whose head gives each token one score instead of one logit
        per vocabulary entry.
      max_positions: longest sequence that the checkpoint supports, in tokens.
      initializer_range: standard deviation of the initial weights.
      bos_id, pad_id: token ids; None if the checkpoint has none.
      eos_ids: token ids that end a completion.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    windows: tuple[int | None, ...] = ()
    experts: Experts | None = None
    initializer_range: float = 0.02
    scored: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None


class Family(NamedTuple):
    """Properties of a `model_type` that config.json does not state."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    head_dim: int | None  # used when config.json has none; None: hidden_size / num_heads
    experts: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", qkv_bias=False, qk_norm=False, head_dim=None),
    "mistral": Family("MistralForCausalLM", qkv_bias=False, qk_norm=False, head_dim=None),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, head_dim=None),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, head_dim=128),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qkv_bias=False, qk_norm=True, head_dim=None, experts=True
    ),
}

_SCORED = "ForSequenceClassification"

# Keys that change the function, with the only values that the decoder supports.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "is_causal": (True, None),
    "quantization_config": (None,),
    "transformers_weights": (None,),  # names other files than model.safetensors
    # The layers are scanned, so all of them are alike.
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
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={shown(model_type)} is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    for key, values in _ONLY.items():
        if raw.get(key, values[0]) not in values:
            raise ValueError(
                f"{model_type} with {key}={shown(raw[key])} is not supported; only {values[0]!r} is"
            )
    c = validated(ConfigJson, raw)
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads
    head_dim = c.head_dim or family.head_dim or c.hidden_size // heads
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads} "
            f"and head_dim={head_dim} must be even"
        )
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
        rope=read_rope(c),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied=c.tie_word_embeddings,
        max_positions=c.max_position_embeddings,
        windows=read_windows(c),
        experts=_read_experts(c) if family.experts else None,
        initializer_range=c.initializer_range,
        scored=_read_scored(c, family),
        bos_id=c.bos_token_id,
        eos_ids=token_ids(c.eos_token_id, vocab_size=c.vocab_size),
        pad_id=c.pad_token_id,
    )


def to_hf_config(config: DecoderConfig, *, dtype: str) -> dict[str, Any]:
    """Builds the content of a config.json that transformers 4 and 5 and vLLM can read.

    Args:
      config: the decoder's.
      dtype: the weights' dtype by its long name, such as "bfloat16".
    """
    rope = write_rope(config.rope)
    architecture = FAMILIES[config.model_type].architecture
    if config.scored:
        architecture = architecture.replace("ForCausalLM", _SCORED)
    content = {
        "architectures": [architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
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
        "rope_parameters": {"rope_theta": config.rope.theta, **rope},
        "rope_theta": config.rope.theta,
        "rope_scaling": rope if config.rope.scaling else None,
    }
    # Without these keys transformers gives a classifier two labels.
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if config.scored else {}
    return content | _write_windows(config) | _write_experts(config.experts) | label


def _read_scored(c: ConfigJson, family: Family) -> bool:
    scored = family.architecture.replace("ForCausalLM", _SCORED)
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


def _read_experts(c: ConfigJson) -> Experts:
    if c.use_sliding_window:
        raise ValueError("qwen3_moe with use_sliding_window=True is not supported; only False is")
    count, per_token, size = c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size
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
        renormalise=c.norm_topk_prob,
    )


def _write_experts(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {}
    return {
        "num_experts": experts.count,  # transformers 4
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_windows(config: DecoderConfig) -> dict[str, Any]:
    window = max((w for w in config.windows if w is not None), default=None)
    if not config.model_type.startswith("qwen"):
        return {"sliding_window": window}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    full = ["full_attention"] * config.num_layers
    # transformers 4 supports windows only as "every layer from this one on".
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.index("sliding_attention") if window else config.num_layers,
        "layer_types": kinds or full,
    }
