"""The decoder's parameters: shape, axes, initial value and Hugging Face name of each."""

from collections.abc import Callable
from typing import Any

from jaxrl.models.components import Experts, Group, Latent, Linear
from jaxrl.models.families import FAMILIES, DecoderConfig
from jaxrl.models.spec import ParamSpec, Specs

Dimension = tuple[int, str]  # size and logical axis
Stacked = Callable[..., dict[str, ParamSpec]]  # (key, Hugging Face name, *dimensions)

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

    def stacked(
        name: str, path: str, *dims: Dimension, scale: float | None = std, transposed: bool = False
    ) -> dict[str, ParamSpec]:
        path = f"{_body(config)}.layers.{{layer}}.{other_names.get(name, path)}"
        one = _spec(path, (group.count, "layers"), *dims, scale=scale)
        return {name: one._replace(first=group.first, step=group.step, transposed=transposed)}

    def norms(part: str) -> dict[str, ParamSpec]:
        layers, width = {}, (config.hidden_size, "norm")
        for name, path in _NORMS[config.norms].items():
            if name.startswith(part):
                layers |= stacked(name, f"{path}.weight", width, scale=_norm_scale(config))
        return layers

    layers = norms("attn")
    if group.linear and config.linear is not None:
        layers |= _delta(config, config.linear, stacked)
    else:
        layers |= _attention(config, stacked, queries, keys)
    layers |= norms("mlp")
    if config.experts is not None and group.routed:
        layers |= _experts(config, config.experts, stacked)
    else:
        mlp = (config.intermediate_size, "mlp")
        if config.fused:
            both = (2 * config.intermediate_size, "fused")
            layers |= stacked("gate_up", "mlp.gate_up_proj.weight", both, hidden)
        else:
            layers |= stacked("gate", "mlp.gate_proj.weight", mlp, hidden)
            layers |= stacked("up", "mlp.up_proj.weight", mlp, hidden)
        layers |= stacked("down", "mlp.down_proj.weight", hidden, mlp)
    if group.linear:
        return layers
    if config.qkv_bias:
        for name, width in {"q": queries, "k": keys, "v": keys}.items():
            layers |= stacked(f"{name}_bias", f"self_attn.{name}_proj.bias", width, scale=0.0)
    if config.o_bias:
        width = (config.hidden_size, "norm")
        layers |= stacked("o_bias", "self_attn.o_proj.bias", width, scale=0.0)
    if config.sinks:
        layers |= stacked("sinks", "self_attn.sinks", (config.num_heads, "q_heads"))
    if config.qk_norm is not None:
        for name, (width, _) in {"q": queries, "k": keys}.items():
            size = config.head_dim if config.qk_norm == "head" else width
            path = f"self_attn.{name}_norm.weight"
            layers |= stacked(f"{name}_norm", path, (size, "norm"), scale=_norm_scale(config))
    return layers


def _attention(
    config: DecoderConfig, stacked: Stacked, queries: Dimension, keys: Dimension
) -> dict[str, ParamSpec]:
    """Declares the projections of attention."""
    hidden, layers = (config.hidden_size, "embed"), dict[str, ParamSpec]()
    if config.latent is not None:
        layers |= _latent(config, config.latent, stacked)
    elif config.fused:
        both = (queries[0] + 2 * keys[0], "fused")
        layers |= stacked("qkv", "self_attn.qkv_proj.weight", both, hidden)
    else:
        gated = (2 * queries[0] if config.output_gate else queries[0], "q_heads")
        layers |= stacked("q", "self_attn.q_proj.weight", gated, hidden)
        layers |= stacked("k", "self_attn.k_proj.weight", keys, hidden)
        layers |= stacked("v", "self_attn.v_proj.weight", keys, hidden)
    values = (config.num_heads * config.value_dim, "q_heads")
    return layers | stacked("o", "self_attn.o_proj.weight", hidden, values)


def _delta(config: DecoderConfig, linear: Linear, stacked: Stacked) -> dict[str, ParamSpec]:
    """Declares the parameters of `linear_attention`."""
    hidden, heads = (config.hidden_size, "embed"), (linear.value_heads, "norm")
    values = linear.value_heads * linear.value_dim
    both, gates = (linear.channels + values, "fused"), (2 * heads[0], "fused")
    kernel = ((linear.channels, "conv"), (1, "conv"), (linear.width, "conv"))
    if linear.split:
        layers = stacked(
            "linear_qkv", "linear_attn.in_proj_qkv.weight", (linear.channels, "fused"), hidden
        )
        layers |= stacked("linear_z", "linear_attn.in_proj_z.weight", (values, "fused"), hidden)
        single = (linear.value_heads, "fused")
        layers |= stacked("linear_beta", "linear_attn.in_proj_b.weight", single, hidden)
        layers |= stacked("linear_step", "linear_attn.in_proj_a.weight", single, hidden)
    else:
        layers = stacked("qkvz", "linear_attn.in_proj_qkvz.weight", both, hidden)
        layers |= stacked("gates", "linear_attn.in_proj_ba.weight", gates, hidden)
    layers |= stacked("conv", "linear_attn.conv1d.weight", *kernel)
    layers |= stacked("decay", "linear_attn.A_log", heads, scale=None)
    layers |= stacked("time_step", "linear_attn.dt_bias", heads, scale=None)
    width = (linear.value_dim, "norm")
    layers |= stacked("linear_norm", "linear_attn.norm.weight", width, scale=None)
    return layers | stacked("linear_o", "linear_attn.out_proj.weight", hidden, (values, "fused"))


def _experts(config: DecoderConfig, settings: Experts, stacked: Stacked) -> dict[str, ParamSpec]:
    """Declares the parameters of experts and of those that all tokens share."""
    hidden, layers = (config.hidden_size, "embed"), dict[str, ParamSpec]()
    experts, mlp = (settings.count, "experts"), (settings.intermediate_size, "mlp")
    one = "mlp.experts.{expert}"
    layers |= stacked("router", "mlp.gate.weight", (experts[0], "router"), hidden)
    if settings.corrected:
        router = (experts[0], "router")
        layers |= stacked("correction_f32", "mlp.gate.e_score_correction_bias", router, scale=0.0)
    if settings.fused:
        # One tensor for all experts of a layer.
        one, both = "mlp.experts", (2 * settings.intermediate_size, "mlp")
        gate_up = (f"{one}.gate_up_proj", experts, both, hidden)
        layers |= stacked("expert_gate_up", *gate_up, transposed=True)
        down = (f"{one}.down_proj", experts, hidden, mlp)
        layers |= stacked("expert_down", *down, transposed=True)
    else:
        layers |= stacked("expert_gate", f"{one}.gate_proj.weight", experts, mlp, hidden)
        layers |= stacked("expert_up", f"{one}.up_proj.weight", experts, mlp, hidden)
        layers |= stacked("expert_down", f"{one}.down_proj.weight", experts, hidden, mlp)
    if settings.biases:
        both = (2 * settings.intermediate_size, "mlp")
        layers |= stacked("router_bias", "mlp.router.bias", (experts[0], "router"))
        gate_up = ("mlp.experts.gate_up_proj_bias", experts, both)
        layers |= stacked("expert_gate_up_bias", *gate_up, scale=0.0)
        down = ("mlp.experts.down_proj_bias", experts, hidden)
        layers |= stacked("expert_down_bias", *down, scale=0.0)
    if settings.shared:
        mlp, one = (settings.shared * mlp[0], "mlp"), "mlp.shared_experts"
        layers |= stacked("shared_gate", f"{one}.gate_proj.weight", mlp, hidden)
        layers |= stacked("shared_up", f"{one}.up_proj.weight", mlp, hidden)
        layers |= stacked("shared_down", f"{one}.down_proj.weight", hidden, mlp)
    if settings.gated_shared:
        mlp, one = (settings.gated_shared, "mlp"), "mlp.shared_expert"
        layers |= stacked("shared_gate", f"{one}.gate_proj.weight", mlp, hidden)
        layers |= stacked("shared_up", f"{one}.up_proj.weight", mlp, hidden)
        layers |= stacked("shared_down", f"{one}.down_proj.weight", hidden, mlp)
        layers |= stacked("shared_score", "mlp.shared_expert_gate.weight", (1, "router"), hidden)
    return layers


def _latent(config: DecoderConfig, latent: Latent, stacked: Stacked) -> dict[str, ParamSpec]:
    """Declares the projections of `latent.project_latent`."""
    hidden, count = (config.hidden_size, "embed"), config.num_heads
    queries = (count * config.head_dim, "q_heads")
    kept = config.head_dim - latent.rope_dim
    both = (count * (kept + latent.value_dim), "kv_heads")
    layers: dict[str, ParamSpec] = {}
    if latent.q_rank is None:
        layers |= stacked("q", "self_attn.q_proj.weight", queries, hidden)
    else:
        rank = (latent.q_rank, "latent")
        layers |= stacked("q_down", "self_attn.q_a_proj.weight", rank, hidden)
        layers |= stacked(
            "q_down_norm", "self_attn.q_a_layernorm.weight", (rank[0], "norm"), scale=None
        )
        layers |= stacked("q_up", "self_attn.q_b_proj.weight", queries, rank)
    rank = (latent.kv_rank, "latent")
    down = (latent.kv_rank + latent.rope_dim, "latent")
    layers |= stacked("kv_down", "self_attn.kv_a_proj_with_mqa.weight", down, hidden)
    layers |= stacked(
        "kv_down_norm", "self_attn.kv_a_layernorm.weight", (rank[0], "norm"), scale=None
    )
    return layers | stacked("kv_up", "self_attn.kv_b_proj.weight", both, rank)
