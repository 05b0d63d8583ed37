"""One decoder for all families: a scan over stacked layers, so that the compiled program does not
grow with their number."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl.models.attention import KEPT, attention
from jaxrl.models.families import DecoderConfig
from jaxrl.models.layers import (
    Constrain,
    embed,
    feed_forward,
    identity,
    matmul,
    project_qkv,
    rms_norm,
    rope_table,
)
from jaxrl.models.spec import Params, ParamSpec, Specs
from jaxrl.precision import Precision


class Hidden(Protocol):
    """The decoder without its head."""

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        *,
        precision: Precision,
    ) -> jax.Array:
        """i32[B, T] tokens, positions within the segment, segments (0: padding) -> the residual
        stream after the final norm, [B, T, D] in `precision.activations`.

        The caller casts `params` to `precision.compute` once a step; what differs is cast here.
        """
        ...


class Model(NamedTuple):
    """What the learner and the sampler see of a model; hashable."""

    config: DecoderConfig
    specs: Specs
    hidden: Hidden
    unembedding: Callable[[Params], jax.Array]  # the head [V, D]; the embedding when tied

    def __hash__(self) -> int:  # the specs are a dict and follow from the config
        return hash((self.config, self.hidden))


_policies = jax.checkpoint_policies
_KEEP_ATTENTION = _policies.save_only_these_names(KEPT)

# What the backward pass finds in memory; the rest it computes again.
_REMAT: dict[str, Callable[..., Any]] = {
    "matmuls": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _KEEP_ATTENTION
    ),
    "attention": _KEEP_ATTENTION,
    "layer": _policies.nothing_saveable,
}


def decoder(
    config: DecoderConfig, *, remat: str = "none", constrain: Constrain = identity
) -> Model:
    """A decoder-only transformer.

    Args:
      config: its family and sizes.
      remat: what the backward pass computes again. "none": nothing. "matmuls": norms, rope and the
        like; outputs of projections and of attention are kept, which takes less than half of the
        memory and on CPU is the fastest, since less is written. "attention": everything but
        attention. "layer": everything; only each layer's input is kept.
      constrain: imposes a layout on activations.

    Raises:
      ValueError: for an unknown `remat`.
    """
    if remat != "none" and remat not in _REMAT:
        raise ValueError(f"remat={remat!r}; expected one of {', '.join(('none', *_REMAT))}")

    def layer_step(x, layer, window, table, segments, precision):
        dims = {"config": config, "precision": precision, "constrain": constrain}
        q, k, v = project_qkv(x, layer, table, **dims)
        out = attention(q, k, v, segments, window=window, precision=precision)
        x = x + matmul(out.reshape(*x.shape[:2], -1), layer["o"], precision=precision)
        x = constrain(x, ("batch", "length", "embed"))
        x = x + feed_forward(x, layer, **dims)
        return constrain(x, ("batch", "length", "embed"))

    def hidden(params, tokens, positions, segments, *, precision):
        table = rope_table(
            positions, rope=config.rope, head_dim=config.head_dim, precision=precision
        )
        far = jnp.iinfo(jnp.int32).max
        windows = jnp.array([far if w is None else w for w in config.windows], jnp.int32)

        def body(x, scanned):
            layer, window = scanned
            return layer_step(x, layer, window, table, segments, precision), None

        if remat != "none":
            body = jax.checkpoint(body, policy=_REMAT[remat], prevent_cse=False)
        x = embed(params["embed"], tokens, precision=precision)
        x = constrain(x, ("batch", "length", "embed"))
        x, _ = jax.lax.scan(body, x, (params["layers"], windows if config.windows else None))
        x = rms_norm(x, params["final_norm"], eps=config.rms_norm_eps, precision=precision)
        return constrain(x, ("batch", "length", "embed"))

    def unembedding(params):
        return params["embed"] if config.tied else params["head"]

    return Model(config, param_specs(config), hidden, unembedding)


def param_specs(config: DecoderConfig) -> Specs:
    """Every parameter of a decoder: shape, axes, initial value and Hugging Face name."""
    hidden, mlp = (config.hidden_size, "embed"), (config.intermediate_size, "mlp")
    queries = (config.num_heads * config.head_dim, "q_heads")
    keys = (config.num_kv_heads * config.head_dim, "kv_heads")
    vocab = (config.vocab_size, "vocab")
    std = config.initializer_range

    def spec(name, *dims, scale):
        return ParamSpec(tuple(n for n, _ in dims), tuple(axis for _, axis in dims), name, scale)

    def stacked(name, *dims, scale):
        name = f"model.layers.{{layer}}.{name}"
        return spec(name, (config.num_layers, "layers"), *dims, scale=scale)

    norm, head_norm = (config.hidden_size, "norm"), (config.head_dim, "norm")
    layers = {
        "attn_norm": stacked("input_layernorm.weight", norm, scale=None),
        "q": stacked("self_attn.q_proj.weight", queries, hidden, scale=std),
        "k": stacked("self_attn.k_proj.weight", keys, hidden, scale=std),
        "v": stacked("self_attn.v_proj.weight", keys, hidden, scale=std),
        "o": stacked("self_attn.o_proj.weight", hidden, queries, scale=std),
        "mlp_norm": stacked("post_attention_layernorm.weight", norm, scale=None),
        "gate": stacked("mlp.gate_proj.weight", mlp, hidden, scale=std),
        "up": stacked("mlp.up_proj.weight", mlp, hidden, scale=std),
        "down": stacked("mlp.down_proj.weight", hidden, mlp, scale=std),
    }
    if config.qkv_bias:
        layers |= {
            "q_bias": stacked("self_attn.q_proj.bias", queries, scale=0.0),
            "k_bias": stacked("self_attn.k_proj.bias", keys, scale=0.0),
            "v_bias": stacked("self_attn.v_proj.bias", keys, scale=0.0),
        }
    if config.qk_norm:
        layers |= {
            "q_norm": stacked("self_attn.q_norm.weight", head_norm, scale=None),
            "k_norm": stacked("self_attn.k_norm.weight", head_norm, scale=None),
        }
    specs: dict[str, Any] = {
        "embed": spec("model.embed_tokens.weight", vocab, hidden, scale=std),
        "layers": layers,
        "final_norm": spec("model.norm.weight", norm, scale=None),
    }
    if not config.tied:
        specs["head"] = spec("lm_head.weight", vocab, hidden, scale=std)
    return specs
