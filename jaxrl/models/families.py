"""Model families: the config of a decoder, and the facts that each family fixes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jaxrl.models.components import Experts, Group, Kind, Latent, Linear
from jaxrl.models.periods import LayerSpan, divide
from jaxrl.models.rope import Rope, YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that determines the decoder's shapes and function.

    Attributes:
      model_type: Hugging Face's name of the family, one of `FAMILIES`.
      intermediate_size: hidden units of the feed-forward networks; kept but unused with experts.
      rope: the rope of layers for which `ropes` gives no other.
      ropes: the rope of each layer, None for none; () if all layers have `rope`.
      windows: the number of tokens that a token attends to in each layer, including itself; None
        for all. () if no layer has a window.
      qkv_bias: true if the projections of queries, keys and values have biases.
      o_bias: true if attention's output projection has one.
      sinks: true if each head has an attention sink, see `Scoring.sinks`.
      qk_norm: the norm of queries and keys: of each head, or of the whole projection.
      norms: places of a layer's norms: before attention and feed-forward network, after them, or
        both.
      norm_plus_one: true if norms multiply by 1 + weight.
      activation: of the feed-forward networks.
      fused: true if one matrix holds the projections of queries, keys and values, and another
        the projections of gate and up.
      scaled_embedding: true if the embedding is multiplied by sqrt(hidden_size).
      query_scalar: scores are divided by its square root; None is head_dim.
      score_cap, logit_cap: soft caps of attention scores and of logits, see `scores.soft_cap`.
      output_gate: true if each head's result is multiplied by the sigmoid of a gate, which comes
        from the projection of queries.
      linear: the layers that have the gated delta rule in place of attention; None for none.
      latent: narrow projections of multi-head latent attention, where `head_dim` is the size of
        queries and keys; None for direct projections.
      experts: None for a dense decoder.
      wrapped: true for the language model of a model of images and text: its tensors have another
        prefix, and config.json describes it in `text_config`.
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
    tied: bool
    max_positions: int
    ropes: tuple[Rope | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    norms: Literal["before", "after", "both"] = "before"
    norm_plus_one: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    fused: bool = False
    scaled_embedding: bool = False
    query_scalar: int | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    output_gate: bool = False
    linear: Linear | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    initializer_range: float = 0.02
    wrapped: bool = False
    scored: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def as_scorer(self) -> "DecoderConfig":
        """Returns the config of a reward model with the same body; it is never wrapped."""
        return dataclasses.replace(self, scored=True, wrapped=False)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The stacks of layers."""
        return tuple(group for groups in self.scans for group in groups)

    @functools.cached_property
    def scans(self) -> tuple[tuple[Group, ...], ...]:
        """The groups in the order of computation; the layers of groups in one entry alternate."""
        dense = self.num_layers if self.experts is None else self.experts.dense_layers
        period = (False,) if self.linear is None else self.linear.period
        layers = [(kind, i >= dense, period[i % len(period)]) for i, kind in enumerate(self.kinds)]
        mixed = len({(kind, linear) for kind, _, linear in layers}) > 1

        def group(span: LayerSpan, first: int) -> Group:
            kind, routed, linear = layers[first]
            name = "layers" if routed or self.experts is None else "dense_layers"
            if mixed:
                name = f"{'linear' if linear else kind.name}_{first}"
            return Group(name, first, span.count, span.period, kind, routed, linear)

        return tuple(
            tuple(group(span, span.first + i) for i in range(span.period))
            for span in divide(layers)
        )

    @property
    def routed_layers(self) -> int:
        """Number of layers with experts; these are the last layers."""
        return sum(group.count for group in self.groups if group.routed)

    @property
    def dense(self) -> bool:
        """True without experts, latent attention and the delta rule."""
        return self.experts is None and self.latent is None and self.linear is None

    def check_blocks(self, blocks: str) -> None:
        """Raises ValueError for a decoder that cannot be computed with a policy's `blocks`."""
        if blocks == "int8" and not self.dense:
            raise ValueError(
                "blocks=int8 is for decoders without experts, latent attention and the delta rule, "
                f"and {self.model_type} has some of them; use blocks=e4m3, or leave it out"
            )

    @property
    def attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return sum(group.count for group in self.groups if not group.linear)

    def cache_places(self, group: Group) -> list[int]:
        """Lists where the sampler's cache has the layers of a group: linear layers keep states, the
        others keys and values."""
        alike = sorted(i for one in self.groups if one.linear == group.linear for i in one.layers)
        return [alike.index(layer) for layer in group.layers]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        windows = self.windows or (None,) * self.num_layers
        ropes = self.ropes or (self.rope,) * self.num_layers
        return tuple(Kind(*one) for one in zip(windows, ropes, strict=True))

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that have a rope."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        scale, scaling = (self.query_scalar or self.head_dim) ** -0.5, self.rope.scaling
        if self.latent is None or not isinstance(scaling, YarnScaling):
            return scale
        return scale * scaling.temperature(scaling.mscale_all_dim or 0.0) ** 2


class Family(NamedTuple):
    """Facts of a `model_type` that config.json does not give."""

    architecture: str  # Hugging Face's class of the language model
    fields: Mapping[str, Any] = {}  # of `DecoderConfig`, the same for every checkpoint
    # Layers with `sliding_window`. "all": all, if it is given. "switch": by a switch and a first
    # layer, or by `layer_types`. "typed": by `layer_types`, or a period with one global layer.
    windows: Literal["none", "all", "switch", "typed"] = "none"
    theta: float = 10_000.0  # default of `rope_theta`
    local_theta: float | None = None  # default for layers with a window, if they have their own
    partial: float | None = None  # default share of rotated dimensions; None: always all
    defaults: Mapping[str, Any] = {}  # transformers' defaults that differ from `ConfigJson`'s
    # Keys that change the function, with the values that are supported; () for any.
    only: Mapping[str, tuple[Any, ...]] = {}
    names: Mapping[str, str] = {}  # Hugging Face's parameter names that other families lack
    packed: bool = False  # checkpoints may be in MXFP4, see `mxfp4`
    scorer: str | None = None  # class of a reward model; None derives it from `architecture`
    # Files may hold layers for multi-token prediction, see `unused.unused_tensors`.
    more_layers: bool = False

    @property
    def scored_architecture(self) -> str:
        """Hugging Face's class of a reward model."""
        return self.scorer or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


_GEMMA = {
    "norms": "both",
    "norm_plus_one": True,
    "activation": "gelu_tanh",
    "scaled_embedding": True,
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_CORRECTED_DEFAULTS = {"num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1}
_DELTA = {"qk_norm": "head", "norm_plus_one": True, "output_gate": True}
_DELTA_DEFAULTS = {"head_dim": 256, "linear_conv_kernel_dim": 4, "full_attention_interval": 4} | {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_EXPERTS = {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10} | {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "intermediate_size": 5632,  # no layer has it
}
_GELU = {"hidden_act": ("gelu_pytorch_tanh",), "hidden_activation": ("gelu_pytorch_tanh", None)}

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", windows="all", defaults={"sliding_window": 4096}),
    "qwen2": Family(
        "Qwen2ForCausalLM", {"qkv_bias": True}, windows="switch", defaults={"sliding_window": 4096}
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": "head"},
        windows="switch",
        defaults={"head_dim": 128, "sliding_window": 4096},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": "head"},
        windows="switch",
        only={"use_sliding_window": (False, None)},
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _DELTA,
        partial=0.25,
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS,
        only={"partial_rotary_factor": ()},
        more_layers=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _DELTA,
        partial=0.25,
        defaults=_DELTA_DEFAULTS | {"num_key_value_heads": 4},
        only={"partial_rotary_factor": ()},
        scorer="Qwen3_5TextForSequenceClassification",
        more_layers=True,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _DELTA,
        partial=0.25,
        defaults=_DELTA_DEFAULTS | _DELTA_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        # transformers divides by the sum, whatever norm_topk_prob says.
        only={"partial_rotary_factor": (), "norm_topk_prob": (True,)},
        more_layers=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        windows="typed",
        defaults=_GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"sliding_window_pattern": 2},
        only=_GELU | {"sliding_window_pattern": (2,)},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": "head"},
        windows="typed",
        theta=1e6,
        local_theta=1e4,
        defaults=_GEMMA_DEFAULTS | {"sliding_window_pattern": 6},
        only=_GELU | {"attn_logit_softcapping": (None,)},  # which transformers ignores
        scorer="Gemma3TextForSequenceClassification",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        windows="all",
        theta=1e6,
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        only={"router_jitter_noise": (0,)},
        names={
            "router": "block_sparse_moe.gate.weight",
            "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
            "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
            "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
        },
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        partial=0.5,
        defaults=_CORRECTED_DEFAULTS
        | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "n_routed_experts": 128}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        only={"attention_bias": (), "partial_rotary_factor": ()},
        more_layers=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        defaults=_CORRECTED_DEFAULTS
        | {"n_routed_experts": 256, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
        | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "q_lora_rank": 1536}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
        more_layers=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        windows="switch",
        theta=2e6,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        only={"use_sliding_window": (False,)},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"norms": "after", "qk_norm": "projection"},
        defaults={"rms_norm_eps": 1e-5},
        only={"clip_qkv": (None,)},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"norms": "after", "qk_norm": "projection"},
        windows="typed",
        theta=5e5,
        local_theta=5e5,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        only={"clip_qkv": (None,), "sliding_window_pattern": (4,)},
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        windows="typed",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        only={"sliding_window_pattern": (None,)},
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        windows="all",
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"fused": True},
        windows="all",
        defaults={"rms_norm_eps": 1e-5},
        only={"resid_pdrop": (0,), "embd_pdrop": (0,)},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"qkv_bias": True, "o_bias": True, "sinks": True},
        windows="typed",
        theta=150_000.0,
        defaults={"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 128, "num_experts_per_tok": 4}
        | {"sliding_window": 128, "sliding_window_pattern": 2}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        only={"attention_bias": (True,), "sliding_window_pattern": (2,)},
        names={"router": "mlp.router.weight"},
        packed=True,
    ),
}
"""Supported families by the `model_type` in their config.json."""
