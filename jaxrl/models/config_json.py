"""The keys of config.json that the decoder reads, with their types and bounds."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from jaxrl.models.checkpoint_files import Table, shown

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


class ConfigJson(Table):
    """A config.json of transformers 4 or 5. The defaults are those of transformers."""

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
    use_sliding_window: bool | None = None
    sliding_window: Tokens | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool = False
    id2label: dict[str, Any] | None = None
    num_labels: int | None = 2
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: Any = None  # an id or a list of ids


def token_ids(value: Any, *, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids in a value of `eos_token_id`: one, several or none.

    Raises:
      ValueError: for anything else, or ids outside of the vocabulary.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(one) is not int or not 0 <= one < vocab_size for one in ids):
        raise ValueError(
            f"eos_token_id={shown(value)}: expected ids from 0 to {vocab_size - 1}, as "
            f"vocab_size={vocab_size} in config.json"
        )
    return tuple(ids)


def read_windows(c: ConfigJson) -> tuple[int | None, ...]:
    """Returns the window of each layer; see `DecoderConfig.windows`.

    Raises:
      ValueError: for windows that the family does not have, or layers without one.
    """
    layers, kinds = c.num_hidden_layers, c.layer_types
    if c.model_type in ("llama", "mistral"):
        # A Mistral without the key has transformers' default; Llama has no windows at all.
        given = c.model_type == "mistral" or "sliding_window" in c.model_fields_set
        window, windowed = c.sliding_window if given else None, [True] * layers
        if kinds is not None or (c.model_type == "llama" and window is not None):
            raise ValueError(
                f"{c.model_type} with sliding_window={window!r} and layer_types={shown(kinds)} is "
                "not supported: Llama has no windows, Mistral has one on every layer"
            )
    else:
        window = c.sliding_window if c.use_sliding_window else None
        windowed = [i >= c.max_window_layers for i in range(layers)]
        if kinds is not None:
            if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != layers:
                raise ValueError(
                    f"layer_types={shown(kinds)}: expected {layers} entries, each "
                    "'full_attention' or 'sliding_attention'"
                )
            windowed = [kind == "sliding_attention" for kind in kinds]
            if window is None and any(windowed):
                raise ValueError(
                    "layer_types has 'sliding_attention', but there is no window: "
                    f"use_sliding_window={c.use_sliding_window}, "
                    f"sliding_window={c.sliding_window}"
                )
    if window is None or not any(windowed):
        return ()
    return tuple(window if inside else None for inside in windowed)
