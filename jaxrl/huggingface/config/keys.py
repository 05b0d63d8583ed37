"""The keys of config.json that the decoder reads, with their types and bounds."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from jaxrl.huggingface.files import Table, excerpt

# In `layer_types`.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# The upper bounds keep the arithmetic on shapes within 64 bits, and lists of names short.
Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=1, le=2**12)]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class RopeJson(Table):
    """`rope_parameters` of transformers 5, or `rope_scaling` of transformers 4."""

    model_config = ConfigDict(extra="allow")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive = 10_000.0
    partial_rotary_factor: float | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Tokens | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: bool | None = None
    llama_4_scaling_beta: NotNegative | None = None
    max_position_embeddings: Tokens | None = None
    # Gemma 3 and OLMo 3 have a table for each kind of attention.
    full_attention: "RopeJson | None" = None
    sliding_attention: "RopeJson | None" = None


class ConfigJson(Table):
    """A config.json of transformers 4 or 5, with transformers' defaults."""

    model_type: str
    architectures: list[str] | None = None
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Tokens
    original_max_position_embeddings: Tokens | None = None
    rms_norm_eps: NotNegative = 1e-6
    initializer_range: NotNegative = 0.02
    tie_word_embeddings: bool = False
    rope_theta: Positive = 10_000.0
    rope_parameters: RopeJson | None = None
    rope_scaling: RopeJson | None = None
    rope_local_base_freq: Positive | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    use_sliding_window: bool | None = None
    sliding_window: Tokens | None = None
    sliding_window_pattern: Count | None = None
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool = False
    n_routed_experts: Count | None = None
    n_shared_experts: Annotated[int, Field(ge=0, le=2**12)] = 1
    n_group: Count = 1
    topk_group: Count = 1
    routed_scaling_factor: Positive = 1.0
    first_k_dense_replace: Annotated[int, Field(ge=0, le=2**12)] = 0
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_rope_head_dim: Size | None = None
    qk_nope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    rope_interleave: bool = True
    shared_expert_intermediate_size: Size | None = None
    full_attention_interval: Count = 4
    linear_num_key_heads: Size | None = None
    linear_num_value_heads: Size | None = None
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=16)] | None = None
    use_qk_norm: bool = False
    attention_bias: bool | None = None
    partial_rotary_factor: float | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: Positive = 7.0
    query_pre_attn_scalar: Size | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    id2label: dict[str, Any] | None = None
    num_labels: int | None = 2
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: Any = None  # an id or a list of ids


def required(c: ConfigJson, *keys: str) -> list[Any]:
    """Returns the values of keys; raises ValueError for missing ones."""
    if missing := [key for key in keys if getattr(c, key) is None]:
        raise ValueError(f"{', '.join(missing)} is missing")
    return [getattr(c, key) for key in keys]


def layers_of(c: ConfigJson, kind: str, kinds: list[str]) -> list[bool]:
    """Returns True for each layer of this kind, from `layer_types`.

    Raises:
      ValueError: for a wrong number of layers, or kinds other than this one and FULL.
    """
    if set(kinds) - {FULL, kind} or len(kinds) != c.num_hidden_layers:
        raise ValueError(
            f"layer_types={excerpt(kinds)}: expected {c.num_hidden_layers} entries, each {FULL!r} "
            f"or {kind!r}"
        )
    return [one == kind for one in kinds]


def token_ids(value: Any, *, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids in a value of `eos_token_id`: one, several or none.

    Raises:
      ValueError: for other values, or ids outside of the vocabulary.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(one) is not int or not 0 <= one < vocab_size for one in ids):
        raise ValueError(
            f"eos_token_id={excerpt(value)}: expected ids from 0 to {vocab_size - 1}, as "
            f"vocab_size={vocab_size} in config.json"
        )
    return tuple(ids)
