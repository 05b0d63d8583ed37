"""Places of a decoder's tensors in vLLM's TPU engine, for its families written in flax.

The engine holds each tensor of a checkpoint in one array, a leaf: attention with its heads apart,
other matrices transposed (tpu-inference 0.32, `models/jax/`).
"""

import math
from typing import NamedTuple

from jaxrl.models.families import DecoderConfig
from jaxrl.models.rope import Llama3Scaling

FAMILIES = ("qwen2", "qwen3", "llama")
# Families that vllm-tpu 0.32.0 has in JAX, and the reason why they have no rules here.
NOT_SERVED = {
    "deepseek_v3": "its kv_b_proj is kept in the 8 bits of a quantised checkpoint",
    "gpt_oss": "it computes in bf16 whatever dtype is asked for, and its arrays have no rules here",
}

# Llama's leaves have names of their own.
_LLAMA = {"embed_tokens.weight": "embed.embedding", "norm.weight": "norm.scale"}


class Place(NamedTuple):
    """A leaf that holds one tensor: the tensor in shape `split`, then its axes in `order`."""

    leaf: str
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return tuple(self.split[axis] for axis in self.order)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance, in numbers of the tensor, between neighbours along each axis of the leaf."""
        distances = [math.prod(self.split[axis + 1 :]) for axis in range(len(self.split))]
        return tuple(distances[axis] for axis in self.order)


def engine_refusal(config: DecoderConfig, *, shards: int) -> str | None:
    """Returns the reason why the rules do not cover a model on `shards` devices; None if they
    do."""
    if config.model_type not in FAMILIES:
        reason = NOT_SERVED.get(
            config.model_type,
            "it has no model in JAX, and the engine's models in torch do not "
            "take a learner's weights",
        )
        return (
            f"vllm-tpu 0.32.0 and model_type {config.model_type!r}: {reason}; served are "
            f"{', '.join(FAMILIES)}"
        )
    if config.model_type == "qwen2" and not config.tied:
        return (
            "vllm-tpu 0.32.0 cannot build Qwen2 with a head of its own: it asks its configuration "
            "for text_config"
        )
    if any(config.windows):
        return "its layers have sliding windows, which the engine's model does not compute"
    scaling = config.rope.scaling
    if scaling is not None and not isinstance(scaling, Llama3Scaling):
        name = type(scaling).__name__
        return f"its rope has {name}, which the engine's model does not compute"
    if config.head_dim != 64 and config.head_dim % 128:
        return (
            f"its heads have {config.head_dim} dimensions, which the engine pads; 64 and multiples "
            "of 128 are not padded"
        )
    if config.num_kv_heads % shards:
        return (
            f"{shards} shards do not divide its {config.num_kv_heads} heads of keys and values, "
            "which the engine would repeat; set sampler.tensor to a divisor"
        )
    return None


def places(name: str, shape: tuple[int, ...], *, config: DecoderConfig) -> list[Place]:
    """Returns the leaves that hold a tensor of Hugging Face's name and shape. A tied embedding of
    Llama is in two: the engine copies it when it starts."""
    split, order = shape, tuple(range(len(shape)))
    module, kind = name.split(".")[-2:]
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    heads["v_proj"] = heads["k_proj"]
    if module in heads:
        split = (heads[module], config.head_dim, *shape[1:])
        order = (2, 0, 1) if kind == "weight" else (0, 1)
    elif module == "o_proj":
        split, order = (shape[0], config.num_heads, config.head_dim), (1, 2, 0)
    elif module in ("gate_proj", "up_proj", "down_proj", "lm_head"):
        order = (1, 0)
    found = [Place(_leaf(name, config), split, order)]
    if config.model_type == "llama" and config.tied and module == "embed_tokens":
        found.append(Place("model.lm_head", split, order))
    return found


def _leaf(name: str, config: DecoderConfig) -> str:
    """Returns the engine's name of a tensor."""
    if config.model_type != "llama":
        return name
    if name == "lm_head.weight":
        return "model.lm_head"
    if name.removeprefix("model.") in _LLAMA:
        return f"model.{_LLAMA[name.removeprefix('model.')]}"
    return name.removesuffix("weight") + ("scale" if "norm" in name else "kernel")
