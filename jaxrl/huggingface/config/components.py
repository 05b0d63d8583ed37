"""Components in config.json: experts, latent attention and linear attention."""

from typing import Any

from jaxrl.huggingface.config.keys import FULL, LINEAR, ConfigJson, layers_of, required
from jaxrl.models.components import ClampedGate, Experts, Latent, Linear
from jaxrl.models.families import DecoderConfig

_LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # families with linear attention
_ROUTED = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "gpt_oss")
_CORRECTED = ("glm4_moe", "deepseek_v3")  # their routers have a correction bias

# Field -> key.
_CORRECTED_KEYS = {
    "count": "n_routed_experts",
    "per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "renormalise": "norm_topk_prob",
    "groups": "n_group",
    "chosen_groups": "topk_group",
    "scale": "routed_scaling_factor",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
}
_LINEAR_KEYS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "width": "linear_conv_kernel_dim",
}


def read_experts(c: ConfigJson) -> Experts | None:
    """Returns `DecoderConfig.experts`.

    Raises:
      ValueError: for a missing key, or numbers that contradict each other.
    """
    if c.model_type in _CORRECTED:
        return _read_corrected(c)
    if c.model_type not in _ROUTED:
        return None
    # All feed-forward networks of these families are experts.
    mixtral, gpt_oss = c.model_type in ("mixtral", "gpt_oss"), c.model_type == "gpt_oss"
    count, local = c.num_experts, c.num_local_experts
    if None not in (count, local) and count != local:
        raise ValueError(f"num_experts={count} and num_local_experts={local} contradict each other")
    size = "intermediate_size" if mixtral else "moe_intermediate_size"
    c = c.model_copy(update={"num_experts": count or local})
    count, per_token, units = required(c, "num_experts", "num_experts_per_tok", size)
    if per_token > count:
        raise ValueError(f"num_experts_per_tok={per_token} is more than the {count} experts")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=units,
        renormalise=mixtral or c.norm_topk_prob,
        gated_shared=(c.shared_expert_intermediate_size or 0) if c.model_type in _LINEAR else 0,
        biases=gpt_oss,
        fused=gpt_oss,
        clamp=ClampedGate(alpha=c.swiglu_alpha, limit=c.swiglu_limit) if gpt_oss else None,
    )


def write_experts(config: DecoderConfig) -> dict[str, Any]:
    """Builds the keys that `read_experts` reads."""
    experts = config.experts
    if experts is None:
        return {}
    if experts.corrected:
        return {
            **{key: getattr(experts, field) for field, key in _CORRECTED_KEYS.items()},
            "num_nextn_predict_layers": 0,  # they are not read
            # transformers has no others; vLLM reads corrections only if it finds these names.
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        }
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


def _read_corrected(c: ConfigJson) -> Experts:
    fields = dict(zip(_CORRECTED_KEYS, required(c, *_CORRECTED_KEYS.values()), strict=True))
    count, per_token = fields["count"], fields["per_token"]
    groups, chosen = c.n_group, c.topk_group
    if count % groups or count < 2 * groups or chosen > groups:
        raise ValueError(
            f"n_group={groups} and topk_group={chosen}: expected equal groups with at least two of "
            f"the n_routed_experts={count} each, and at most {groups} chosen groups"
        )
    if per_token > chosen * count // groups:
        raise ValueError(
            f"num_experts_per_tok={per_token} is more than the {chosen * count // groups} experts "
            f"of topk_group={chosen} groups"
        )
    if c.first_k_dense_replace >= c.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace={c.first_k_dense_replace} must be less than "
            f"num_hidden_layers={c.num_hidden_layers}: a decoder without experts is not supported"
        )
    return Experts(**fields, scores="sigmoid", corrected=True)


def read_latent(c: ConfigJson) -> tuple[Latent, int]:
    """Returns `DecoderConfig.latent` and the size of queries and keys.

    Raises:
      ValueError: for missing sizes, or keys that contradict each other.
    """
    kv_rank, rope, kept, value_dim = required(
        c, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    )
    if rope % 2 or c.head_dim not in (rope, None):
        raise ValueError(
            f"qk_rope_head_dim={rope} and head_dim={c.head_dim}: expected an even number, the same "
            "for both, or no head_dim"
        )
    if c.num_key_value_heads not in (c.num_attention_heads, None):
        raise ValueError(
            f"num_key_value_heads={c.num_key_value_heads} is not supported for {c.model_type}; "
            f"expected num_attention_heads={c.num_attention_heads}"
        )
    latent = Latent(
        q_rank=c.q_lora_rank,
        kv_rank=kv_rank,
        rope_dim=rope,
        value_dim=value_dim,
        interleaved=c.rope_interleave,
    )
    return latent, rope + kept


def write_latent(latent: Latent, *, head_dim: int) -> dict[str, Any]:
    """Builds the keys that `read_latent` reads."""
    return {
        "head_dim": latent.rope_dim,  # as transformers calls it
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": head_dim - latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.interleaved,
    }


def read_linear(c: ConfigJson) -> Linear | None:
    """Returns `DecoderConfig.linear`.

    Raises:
      ValueError: for missing sizes, numbers of heads that do not divide, or unsupported layers.
    """
    if c.model_type not in _LINEAR:
        return None
    sizes = dict(zip(_LINEAR_KEYS, required(c, *_LINEAR_KEYS.values()), strict=True))
    keys, values = sizes["key_heads"], sizes["value_heads"]
    if values % keys:
        raise ValueError(
            f"linear_num_value_heads={values} must be a multiple of linear_num_key_heads={keys}"
        )
    if c.sliding_window is not None:
        raise ValueError(f"sliding_window={c.sliding_window} is not supported for {c.model_type}")
    return Linear(**sizes, period=_read_period(c), split=c.model_type.startswith("qwen3_5"))


def _read_period(c: ConfigJson) -> tuple[bool, ...]:
    """Returns the shortest list that `layer_types` repeats: true for linear layers."""
    layers, every = c.num_hidden_layers, c.full_attention_interval
    linear = [(i + 1) % every > 0 for i in range(layers)]
    if c.layer_types is not None:
        linear = layers_of(c, LINEAR, c.layer_types)
    if set(linear) != {True, False}:
        raise ValueError(
            f"{c.model_type} needs layers of both {FULL!r} and {LINEAR!r}: see layer_types, or "
            f"full_attention_interval={every} and num_hidden_layers={layers}"
        )
    sizes = (n for n in range(1, layers + 1) if layers % n == 0)
    size = next(n for n in sizes if linear == linear[:n] * (layers // n))
    return tuple(linear[:size])


def write_linear(linear: Linear, *, layers: int) -> dict[str, Any]:
    """Builds the keys that `read_linear` reads."""
    period = [LINEAR if one else FULL for one in linear.period]
    content: dict[str, Any] = {key: getattr(linear, field) for field, key in _LINEAR_KEYS.items()}
    content["layer_types"] = period * (layers // len(period))
    if linear.period == (True,) * (len(period) - 1) + (False,):
        content["full_attention_interval"] = len(period)
    return content
