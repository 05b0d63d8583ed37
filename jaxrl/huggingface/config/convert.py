"""Conversion between a Hugging Face config.json and a `DecoderConfig`.

Two formats are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`), which most
checkpoints have, and transformers 5 (`rope_parameters`, `dtype`). Unsupported settings are never
ignored: the error names them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.huggingface.config.components import (
    read_experts,
    read_latent,
    read_linear,
    write_experts,
    write_latent,
    write_linear,
)
from jaxrl.huggingface.config.keys import ConfigJson, token_ids
from jaxrl.huggingface.config.quantization import quant_method, read_block
from jaxrl.huggingface.config.rope import read_ropes, write_ropes
from jaxrl.huggingface.config.windows import read_windows, write_windows
from jaxrl.huggingface.files import excerpt, validated
from jaxrl.models.families import FAMILIES, DecoderConfig, Family

# Keys of all families that change the function, with the values that are supported.
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

# Type of a model of images and text -> architecture. Its language model's type ends in "_text".
_WRAPPERS = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
# Keys around `text_config` that belong to the language model.
_OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")

# Field of `DecoderConfig` -> key, in all families.
_KEYS = {
    "model_type": "model_type",
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "bos_id": "bos_token_id",
    "pad_id": "pad_token_id",
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_GEMMA = ("gemma2", "gemma3_text")
_GEMMA_KEYS = {
    "query_scalar": "query_pre_attn_scalar",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}


def from_hf_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the content of a config.json of transformers 4 or 5.

    Raises:
      ValueError: if a `model_type`, rope type or other setting is not supported, a key is missing
        or of the wrong type, or keys contradict each other; the message names them.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in _WRAPPERS:
        return dataclasses.replace(from_hf_config(_unwrap(raw)), wrapped=True)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={excerpt(model_type)} is not supported; supported are "
            f"{', '.join((*FAMILIES, *_WRAPPERS))}"
        )
    family = FAMILIES[model_type]
    if read_block(raw) is not None or (family.packed and quant_method(raw) == "mxfp4"):
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    for key, values in (_ONLY | dict(family.only)).items():
        if values and raw.get(key, values[0]) not in values:
            raise ValueError(
                f"{model_type} with {key}={excerpt(raw[key])} is not supported; "
                f"only {values[0]!r} is"
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
    linear = read_linear(c)
    windows = () if linear else read_windows(c, family.windows)
    rope, ropes = read_ropes(c, family, windows)
    return DecoderConfig(
        **{field: getattr(c, key) for field, key in _keys(model_type).items()},
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        ropes=ropes,
        windows=windows,
        linear=linear,
        latent=latent,
        experts=read_experts(c),
        scored=_read_scored(c, family),
        eos_ids=token_ids(c.eos_token_id, vocab_size=c.vocab_size),
        **(_read_glm(c) | dict(family.fields)),
    )


def to_hf_config(config: DecoderConfig, *, dtype: str) -> dict[str, Any]:
    """Builds the content of a config.json that transformers 4 and 5 and vLLM can read.

    Args:
      config: the decoder's.
      dtype: the weights' dtype by its long name, such as "bfloat16".
    """
    family = FAMILIES[config.model_type]
    activation, ends = _ACTIVATIONS[config.activation], list(config.eos_ids)
    content = {
        "architectures": [family.scored_architecture if config.scored else family.architecture],
        **{key: getattr(config, field) for field, key in _keys(config.model_type).items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": activation,
        "attention_dropout": 0.0,
        # transformers takes the first of a list for padding, so an empty one is an error there.
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
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
    content |= write_experts(config) | _write_glm(config)
    content |= {"attention_bias": True} if config.o_bias else {}
    content |= {"hidden_activation": activation} if config.model_type in _GEMMA else {}
    if config.latent is not None:
        content |= write_latent(config.latent, head_dim=config.head_dim)
    # Without these keys transformers gives a classifier two labels.
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if config.scored else {}
    return _wrap(content) if config.wrapped else content | label


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


def _keys(model_type: str) -> dict[str, str]:
    return _KEYS | _GEMMA_KEYS if model_type in _GEMMA else _KEYS


def _read_glm(c: ConfigJson) -> dict[str, Any]:
    """Returns fields that only GLM's config.json decides."""
    if c.model_type != "glm4_moe":
        return {}
    return {"qkv_bias": bool(c.attention_bias), "qk_norm": "head" if c.use_qk_norm else None}


def _write_glm(config: DecoderConfig) -> dict[str, Any]:
    if config.model_type != "glm4_moe":
        return {}
    return {"attention_bias": config.qkv_bias, "use_qk_norm": config.qk_norm == "head"}


def _unwrap(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the language model inside one of `_WRAPPERS`.

    Raises:
      ValueError: if there is none, it is of another family, or it contradicts the keys around it.
    """
    outer = raw["model_type"]
    inner, text = f"{outer}_text", raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != inner:
        raise ValueError(
            f"text_config={excerpt(text)}: expected an object with model_type={inner!r}"
        )
    if raw.get("architectures") not in (None, [_WRAPPERS[outer]]):
        raise ValueError(
            f"architectures={excerpt(raw['architectures'])} with model_type={outer!r} is not "
            f"supported; only [{_WRAPPERS[outer]!r}] is"
        )
    tied = "tie_word_embeddings"
    if raw.get(tied, False) != text.get(tied, False):  # transformers reads one, vLLM the other
        raise ValueError(
            f"{tied}={excerpt(raw.get(tied, False))} and {excerpt(text.get(tied, False))} in "
            "text_config contradict each other"
        )
    return {key: raw[key] for key in _OUTSIDE if key in raw} | text


def _wrap(text: Mapping[str, Any]) -> dict[str, Any]:
    """Wraps the config of a language model, without the keys about images."""
    outer = text["model_type"].removesuffix("_text")
    own = ("dtype", "torch_dtype", "tie_word_embeddings")
    return {
        "architectures": [_WRAPPERS[outer]],
        "model_type": outer,
        **{key: text[key] for key in own},
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
    }
