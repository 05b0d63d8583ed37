"""The decoder's parameters: shape, axes, initial value and Hugging Face name of each."""

from collections.abc import Callable
from typing import Any

from jaxrl.models.components import Experts, Group, Latent, Linear
from jaxrl.models.families import FAMILIES, DecoderConfig
from jaxrl.models.spec import ParamSpec, Specs

Dimension = tuple[int, str]  # size and logical axis
Declare = Callable[..., None]  # (key, Hugging Face name, *dimensions)

# Hugging Face's names of a layer's norms, by their place.
_NORMS = {
    "before": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attn_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}


def param_specs(config: DecoderConfig) -> Specs:
    """Declares the parameters of a decoder: shape, axes, initial value and Hugging Face name."""
    hidden, vocab = (config.hidden_size, "embed"), (config.vocab_size, "vocab")
    std, body = config.initializer_range, _body(config)
    specs: dict[str, Any] = {
        "embed": _spec(f"{body}.embed_tokens.weight", vocab, hidden, scale=std),
        **{group.name: _layers(config, group) for group in config.groups},
        "final_norm": _spec(f"{body}.norm.weight", (hidden[0], "norm"), scale=_norm_scale(config)),
    }
    if config.scored:
        # Zeros: a reward model initialised from a language model scores every completion alike.
        specs["score"] = _spec("score.weight", (1, "label"), hidden, scale=0.0)
    elif not config.tied:
        specs["head"] = _spec("lm_head.weight", vocab, hidden, scale=std)
    return specs


def _spec(name: str, *dims: Dimension, scale: float | None) -> ParamSpec:
    return ParamSpec(tuple(n for n, _ in dims), tuple(axis for _, axis in dims), name, scale)


def _body(config: DecoderConfig) -> str:
    """Returns Hugging Face's name of the decoder without its head."""
    return "model.language_model" if config.wrapped else "model"


def _norm_scale(config: DecoderConfig) -> float | None:
    """Returns the `ParamSpec.scale` of norms, which multiply by 1 at first."""
    return 0.0 if config.norm_plus_one else None


def _layers(config: DecoderConfig, group: Group) -> dict[str, ParamSpec]:
    hidden, std = (config.hidden_size, "embed"), config.initializer_range
    queries = (config.num_heads * config.head_dim, "q_heads")
    keys = (config.num_kv_heads * config.head_dim, "kv_heads")
    other_names = FAMILIES[config.model_type].names
    layers: dict[str, ParamSpec] = {}

    def declare(
        name: str, path: str, *dims: Dimension, scale: float | None = std, transposed: bool = False
    ) -> None:
        path = f"{_body(config)}.layers.{{layer}}.{other_names.get(name, path)}"
        one = _spec(path, (group.count, "layers"), *dims, scale=scale)
        layers[name] = one._replace(first=group.first, step=group.step, transposed=transposed)

    def declare_norms(part: str) -> None:
        for name, path in _NORMS[config.norms].items():
            if name.startswith(part):
                width = (config.hidden_size, "norm")
                declare(name, f"{path}.weight", width, scale=_norm_scale(config))

    declare_norms("attn")
    if group.linear and config.linear is not None:
        _delta(config, config.linear, declare)
    else:
        _attention(config, declare, queries, keys)
    declare_norms("mlp")
    if config.experts is not None and group.routed:
        _experts(config, config.experts, declare)
    elif config.fused:
        both = (2 * config.intermediate_size, "fused")
        declare("gate_up", "mlp.gate_up_proj.weight", both, hidden)
        declare("down", "mlp.down_proj.weight", hidden, (config.intermediate_size, "mlp"))
    else:
        _gated(declare, "mlp", (config.intermediate_size, "mlp"), hidden)
    if group.linear:
        return layers
    if config.qkv_bias:
        for name, width in {"q": queries, "k": keys, "v": keys}.items():
            declare(f"{name}_bias", f"self_attn.{name}_proj.bias", width, scale=0.0)
    if config.o_bias:
        declare("o_bias", "self_attn.o_proj.bias", (config.hidden_size, "norm"), scale=0.0)
    if config.sinks:
        declare("sinks", "self_attn.sinks", (config.num_heads, "q_heads"))
    if config.qk_norm is not None:
        for name, (width, _) in {"q": queries, "k": keys}.items():
            size = (config.head_dim if config.qk_norm == "head" else width, "norm")
            path = f"self_attn.{name}_norm.weight"
            declare(f"{name}_norm", path, size, scale=_norm_scale(config))
    return layers


def _attention(
    config: DecoderConfig, declare: Declare, queries: Dimension, keys: Dimension
) -> None:
    """Declares the projections of attention."""
    hidden = (config.hidden_size, "embed")
    if config.latent is not None:
        _latent(config, config.latent, declare)
    elif config.fused:
        both = (queries[0] + 2 * keys[0], "fused")
        declare("qkv", "self_attn.qkv_proj.weight", both, hidden)
    else:
        gated = (2 * queries[0] if config.output_gate else queries[0], "q_heads")
        declare("q", "self_attn.q_proj.weight", gated, hidden)
        declare("k", "self_attn.k_proj.weight", keys, hidden)
        declare("v", "self_attn.v_proj.weight", keys, hidden)
    values = (config.num_heads * config.value_dim, "q_heads")
    declare("o", "self_attn.o_proj.weight", hidden, values)


def _delta(config: DecoderConfig, linear: Linear, declare: Declare) -> None:
    """Declares the parameters of `linear_attention`."""
    hidden, heads = (config.hidden_size, "embed"), (linear.value_heads, "norm")
    values = linear.value_heads * linear.value_dim
    both, gates = (linear.channels + values, "fused"), (2 * heads[0], "fused")
    kernel = ((linear.channels, "conv"), (1, "conv"), (linear.width, "conv"))
    if linear.split:
        single = (linear.value_heads, "fused")
        declare("linear_qkv", "linear_attn.in_proj_qkv.weight", (linear.channels, "fused"), hidden)
        declare("linear_z", "linear_attn.in_proj_z.weight", (values, "fused"), hidden)
        declare("linear_beta", "linear_attn.in_proj_b.weight", single, hidden)
        declare("linear_step", "linear_attn.in_proj_a.weight", single, hidden)
    else:
        declare("qkvz", "linear_attn.in_proj_qkvz.weight", both, hidden)
        declare("gates", "linear_attn.in_proj_ba.weight", gates, hidden)
    declare("conv", "linear_attn.conv1d.weight", *kernel)
    declare("decay", "linear_attn.A_log", heads, scale=None)
    declare("time_step", "linear_attn.dt_bias", heads, scale=None)
    declare("linear_norm", "linear_attn.norm.weight", (linear.value_dim, "norm"), scale=None)
    declare("linear_o", "linear_attn.out_proj.weight", hidden, (values, "fused"))


def _gated(
    declare: Declare, path: str, mlp: Dimension, hidden: Dimension, *experts: Dimension, prefix=""
) -> None:
    """Declares a gated feed-forward network, or one for each of the `experts`."""
    declare(f"{prefix}gate", f"{path}.gate_proj.weight", *experts, mlp, hidden)
    declare(f"{prefix}up", f"{path}.up_proj.weight", *experts, mlp, hidden)
    declare(f"{prefix}down", f"{path}.down_proj.weight", *experts, hidden, mlp)


def _experts(config: DecoderConfig, settings: Experts, declare: Declare) -> None:
    """Declares the parameters of experts and of those that all tokens share."""
    hidden, router = (config.hidden_size, "embed"), (settings.count, "router")
    experts, mlp = (settings.count, "experts"), (settings.intermediate_size, "mlp")
    both = (2 * settings.intermediate_size, "mlp")
    declare("router", "mlp.gate.weight", router, hidden)
    if settings.corrected:
        declare("correction_f32", "mlp.gate.e_score_correction_bias", router, scale=0.0)
    if settings.fused:
        # One tensor for all experts of a layer.
        gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
        declare("expert_gate_up", gate_up, experts, both, hidden, transposed=True)
        declare("expert_down", down, experts, hidden, mlp, transposed=True)
    else:
        _gated(declare, "mlp.experts.{expert}", mlp, hidden, experts, prefix="expert_")
    if settings.biases:
        declare("router_bias", "mlp.router.bias", router)
        gate_up, down = "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"
        declare("expert_gate_up_bias", gate_up, experts, both, scale=0.0)
        declare("expert_down_bias", down, experts, hidden, scale=0.0)
    if settings.shared:
        mlp = (settings.shared * settings.intermediate_size, "mlp")
        _gated(declare, "mlp.shared_experts", mlp, hidden, prefix="shared_")
    if settings.gated_shared:
        mlp = (settings.gated_shared, "mlp")
        _gated(declare, "mlp.shared_expert", mlp, hidden, prefix="shared_")
        declare("shared_score", "mlp.shared_expert_gate.weight", (1, "router"), hidden)


def _latent(config: DecoderConfig, latent: Latent, declare: Declare) -> None:
    """Declares the projections of `latent.project_latent`."""
    hidden, count = (config.hidden_size, "embed"), config.num_heads
    queries = (count * config.head_dim, "q_heads")
    kept = config.head_dim - latent.rope_dim
    both = (count * (kept + latent.value_dim), "kv_heads")
    if latent.q_rank is None:
        declare("q", "self_attn.q_proj.weight", queries, hidden)
    else:
        rank, norm = (latent.q_rank, "latent"), (latent.q_rank, "norm")
        declare("q_down", "self_attn.q_a_proj.weight", rank, hidden)
        declare("q_down_norm", "self_attn.q_a_layernorm.weight", norm, scale=None)
        declare("q_up", "self_attn.q_b_proj.weight", queries, rank)
    rank, norm = (latent.kv_rank, "latent"), (latent.kv_rank, "norm")
    down = (latent.kv_rank + latent.rope_dim, "latent")
    declare("kv_down", "self_attn.kv_a_proj_with_mqa.weight", down, hidden)
    declare("kv_down_norm", "self_attn.kv_a_layernorm.weight", norm, scale=None)
    declare("kv_up", "self_attn.kv_b_proj.weight", both, rank)
