"""An engine's arrays as vllm-tpu 0.32.0 made them on one device, and an engine that holds them.

Recorded from `model_runner.state` for models of hidden size 256, MLP 128, 4 heads and 2 of keys and
values, of 64 dimensions (Qwen3: 128), vocabulary 64, 2 layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tests import tiny

QWEN3 = dataclasses.replace(tiny.CONFIG, hidden_size=256, intermediate_size=128, head_dim=128)
QWEN2 = dataclasses.replace(QWEN3, model_type="qwen2", head_dim=64, qk_norm=None, qkv_bias=True)
LLAMA = dataclasses.replace(QWEN2, model_type="llama", qkv_bias=False, tied=False)
TIED_LLAMA = dataclasses.replace(LLAMA, tied=True)

_QWEN2_LAYER = {
    "input_layernorm.weight": (256,),
    "mlp.down_proj.weight": (128, 256),
    "mlp.gate_proj.weight": (256, 128),
    "mlp.up_proj.weight": (256, 128),
    "post_attention_layernorm.weight": (256,),
    "self_attn.k_proj.bias": (2, 64),
    "self_attn.k_proj.weight": (256, 2, 64),
    "self_attn.o_proj.weight": (4, 64, 256),
    "self_attn.q_proj.bias": (4, 64),
    "self_attn.q_proj.weight": (256, 4, 64),
    "self_attn.v_proj.bias": (2, 64),
    "self_attn.v_proj.weight": (256, 2, 64),
}
_QWEN3_LAYER = {
    "input_layernorm.weight": (256,),
    "mlp.down_proj.weight": (128, 256),
    "mlp.gate_proj.weight": (256, 128),
    "mlp.up_proj.weight": (256, 128),
    "post_attention_layernorm.weight": (256,),
    "self_attn.k_norm.weight": (128,),
    "self_attn.k_proj.weight": (256, 2, 128),
    "self_attn.o_proj.weight": (4, 128, 256),
    "self_attn.q_norm.weight": (128,),
    "self_attn.q_proj.weight": (256, 4, 128),
    "self_attn.v_proj.weight": (256, 2, 128),
}
_LLAMA_LAYER = {
    "input_layernorm.scale": (256,),
    "mlp.down_proj.kernel": (128, 256),
    "mlp.gate_proj.kernel": (256, 128),
    "mlp.up_proj.kernel": (256, 128),
    "post_attention_layernorm.scale": (256,),
    "self_attn.k_proj.kernel": (256, 2, 64),
    "self_attn.o_proj.kernel": (4, 64, 256),
    "self_attn.q_proj.kernel": (256, 4, 64),
    "self_attn.v_proj.kernel": (256, 2, 64),
}
_QWEN = {"model.embed_tokens.weight": (64, 256), "model.norm.weight": (256,)}
_LLAMA = {"model.embed.embedding": (64, 256), "model.norm.scale": (256,)}
_RECORDED = [
    (QWEN3, _QWEN, _QWEN3_LAYER),
    (QWEN2, _QWEN, _QWEN2_LAYER),
    (dataclasses.replace(QWEN3, tied=False), _QWEN | {"lm_head.weight": (256, 64)}, _QWEN3_LAYER),
    (LLAMA, _LLAMA | {"model.lm_head": (256, 64)}, _LLAMA_LAYER),
    # A copy of the embedding, not transposed.
    (TIED_LLAMA, _LLAMA | {"model.lm_head": (64, 256)}, _LLAMA_LAYER),
]
LEAVES = [
    (
        config,
        ends | {f"model.layers.{i}.{name}": one for i in (0, 1) for name, one in layer.items()},
    )
    for config, ends, layer in _RECORDED
]


class RecordedEngine:
    """A `LiveEngine` that notes its calls."""

    def __init__(self, shapes, *, dtype=jnp.float32, sharding=None) -> None:
        sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.state = {
            name: jax.device_put(jnp.zeros(shape, dtype), sharding)
            for name, shape in shapes.items()
        }
        self.taken = dict(self.state)
        self.calls: list[str] = []
        self.idle = True

    def leaves(self):
        return dict(self.state)

    def served(self):
        return dict(self.taken)

    def write(self, leaf, array) -> None:
        if self.calls[-1] != "write":
            self.calls.append("write")
        self.state[leaf] = array

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.idle

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def refresh(self) -> None:
        self.calls.append("refresh")
        self.taken = dict(self.state)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")
