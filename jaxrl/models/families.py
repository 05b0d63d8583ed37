"""Model families: conversion between a Hugging Face config.json and a `DecoderConfig`.

Two formats are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`), which most
checkpoints have, and transformers 5 (`rope_parameters`, `dtype`). A setting that the decoder does
not support is an error that names it; none is ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Frequency-dependent scaling of Llama 3.1 and later.

    Wavelengths longer than `original_max_positions / low_freq_factor` are stretched by `factor`.
    Those shorter than `original_max_positions / high_freq_factor` are kept. Those between are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (arXiv:2306.15595): every frequency is divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864) over the whole head dimension."""

    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | None = None


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
    "quantization_config": (None,),
    # The layers are scanned, so all of them are alike.
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}


def from_hf_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the content of a config.json of transformers 4 or 5.

    Raises:
      ValueError: if a `model_type`, rope type or other setting is not supported, a key is missing,
        or sizes contradict each other; the message names it.
    """
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    for key, values in _ONLY.items():
        if raw.get(key, values[0]) not in values:
            raise ValueError(
                f"{model_type} with {key}={raw[key]!r} is not supported; only {values[0]!r} is"
            )
    heads, hidden = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    kv_heads = raw.get("num_key_value_heads") or heads
    head_dim = raw.get("head_dim") or family.head_dim or hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads} "
            f"and head_dim={head_dim} must be even"
        )
    return DecoderConfig(
        model_type=model_type,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_size(raw, "intermediate_size"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_read_rope(raw),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied=bool(raw.get("tie_word_embeddings", False)),
        max_positions=_size(raw, "max_position_embeddings"),
        windows=_read_windows(raw, model_type),
        experts=_read_experts(raw) if family.experts else None,
        initializer_range=float(raw.get("initializer_range", 0.02)),
        scored=_read_scored(raw),
        bos_id=raw.get("bos_token_id"),
        eos_ids=token_ids(raw.get("eos_token_id")),
        pad_id=raw.get("pad_token_id"),
    )


def to_hf_config(config: DecoderConfig, *, dtype: str) -> dict[str, Any]:
    """Builds the content of a config.json that transformers 4 and 5 and vLLM can read.

    Args:
      config: the decoder's.
      dtype: the weights' dtype by its long name, such as "bfloat16".
    """
    rope = _write_rope(config.rope)
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


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key}={value!r}, expected a positive integer")
    return value


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns the ids in a value of `eos_token_id`: one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _read_scored(raw: Mapping[str, Any]) -> bool:
    if not any(name.endswith(_SCORED) for name in raw.get("architectures") or ()):
        return False
    labels = len(raw["id2label"]) if raw.get("id2label") else raw.get("num_labels", 2)
    if labels != 1:
        raise ValueError(
            f"config.json: a classifier with {labels} labels (id2label); a reward model has one"
        )
    return True


def _read_rope(raw: Mapping[str, Any]) -> Rope:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if parameters.get("partial_rotary_factor", 1) != 1:
        factor = parameters["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor={factor!r} is not supported; only 1 is")
    try:
        if kind == "default":
            return Rope(theta=theta)
        if kind == "linear":
            return Rope(theta=theta, scaling=LinearScaling(factor=float(parameters["factor"])))
        if kind == "llama3":
            original = parameters["original_max_position_embeddings"]
            scaling = Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_positions=int(original),
            )
            return Rope(theta=theta, scaling=scaling)
    except KeyError as missing:
        raise ValueError(f"rope type {kind!r} in config.json lacks {missing}") from None
    raise ValueError(
        f"rope type {kind!r} is not supported; supported are 'default', 'linear', 'llama3'"
    )


def _write_rope(rope: Rope) -> dict[str, Any]:
    scaling = rope.scaling
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def _read_experts(raw: Mapping[str, Any]) -> Experts:
    if raw.get("use_sliding_window"):
        raise ValueError("qwen3_moe with use_sliding_window=True is not supported; only False is")
    count = _size(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")
    per_token = _size(raw, "num_experts_per_tok")
    if per_token > count:
        raise ValueError(f"num_experts_per_tok={per_token} is more than the {count} experts")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=_size(raw, "moe_intermediate_size"),
        renormalise=bool(raw.get("norm_topk_prob", False)),
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


def _read_windows(raw: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    layers = _size(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if model_type in ("llama", "mistral"):
        # A Mistral without the key has transformers' default; Llama has no windows at all.
        window = raw.get("sliding_window", 4096 if model_type == "mistral" else None)
        windowed = [True] * layers
        if kinds is not None or (model_type == "llama" and window is not None):
            raise ValueError(
                f"{model_type} with sliding_window={window!r} and layer_types={kinds!r} is not "
                "supported: Llama has no windows, Mistral has one on every layer"
            )
    else:
        window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
        first = raw.get("max_window_layers", 28)
        windowed = [i >= first for i in range(layers)]
        if kinds is not None:
            unknown = set(kinds) - {"full_attention", "sliding_attention"}
            if unknown or len(kinds) != layers:
                raise ValueError(
                    f"layer_types={kinds!r}: expected {layers} entries, each 'full_attention' or "
                    "'sliding_attention'"
                )
            windowed = [kind == "sliding_attention" for kind in kinds]
    if window is None or not any(windowed):
        return ()
    return tuple(int(window) if inside else None for inside in windowed)


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
