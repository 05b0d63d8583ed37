"""A tiny model and random rollouts, for tests of what is built on them."""

import dataclasses
import functools
import json
import math
import string
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxrl import huggingface
from jaxrl.core.batch import Rollout
from jaxrl.core.precision import PRESETS
from jaxrl.models import spec
from jaxrl.models.components import ClampedGate, Experts, Latent, Linear
from jaxrl.models.families import DecoderConfig
from jaxrl.models.model import Model, decoder
from jaxrl.models.rope import Rope, YarnScaling
from jaxrl.models.spec import Params

CONFIG = DecoderConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope=Rope(theta=10000.0),
    qkv_bias=False,
    qk_norm="head",
    tied=True,
    max_positions=128,
    initializer_range=0.2,  # far from uniform, so that log-probs differ
    eos_ids=(1,),
    pad_id=0,
)

MOE = dataclasses.replace(
    CONFIG,
    model_type="qwen3_moe",
    experts=Experts(count=8, per_token=2, intermediate_size=16, renormalise=True),
)

# A dense layer before one whose experts are chosen by groups, with a shared one; partial rope.
GLM = dataclasses.replace(
    CONFIG,
    model_type="glm4_moe",
    rope=Rope(theta=10000.0, share=0.5),
    experts=Experts(
        count=8,
        per_token=2,
        intermediate_size=16,
        renormalise=True,
        scores="sigmoid",
        corrected=True,
        groups=4,
        chosen_groups=2,
        scale=1.5,
        shared=1,
        dense_layers=1,
    ),
)

# Keys and values through a narrow projection.
DEEPSEEK = dataclasses.replace(
    GLM,
    model_type="deepseek_v3",
    num_kv_heads=4,
    qk_norm=None,
    rope=CONFIG.rope,
    latent=Latent(q_rank=12, kv_rank=16, rope_dim=4, value_dim=6, interleaved=True),
)

# Norms around each part, soft caps, windows and two ropes; the other families' norms; one matrix
# for several projections.
GEMMA = dataclasses.replace(
    CONFIG,
    model_type="gemma2",
    qk_norm=None,
    norms="both",
    norm_plus_one=True,
    activation="gelu_tanh",
    scaled_embedding=True,
    query_scalar=12,
    score_cap=3.0,
    logit_cap=4.0,
    windows=(5, None),
    ropes=(Rope(theta=300.0), CONFIG.rope),
)
OLMO = dataclasses.replace(CONFIG, model_type="olmo2", qk_norm="projection", norms="after")
PHI = dataclasses.replace(CONFIG, model_type="phi3", qk_norm=None, fused=True, tied=False)

# Attention sinks, biases, and clamped experts that share a tensor.
GPT_OSS = dataclasses.replace(
    CONFIG,
    model_type="gpt_oss",
    qk_norm=None,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    rope=Rope(theta=1e4, scaling=YarnScaling(factor=4.0, original_max_positions=16)),
    tied=False,
    windows=(5, None),
    intermediate_size=16,
    experts=Experts(
        count=8,
        per_token=2,
        intermediate_size=16,
        renormalise=True,
        biases=True,
        fused=True,
        clamp=ClampedGate(alpha=1.5, limit=0.5),
    ),
)


# A linear layer before one with attention, whose output has a gate; experts and a gated shared one.
NEXT = dataclasses.replace(
    CONFIG,
    model_type="qwen3_next",
    norm_plus_one=True,
    output_gate=True,
    rope=Rope(theta=10000.0, share=0.5),
    linear=Linear(
        key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4, period=(True, False)
    ),
    experts=Experts(count=8, per_token=2, intermediate_size=16, renormalise=True, gated_shared=16),
)

# The same without experts; the linear layers have a matrix for each projection. Larger weights
# would amplify rounding.
QWEN3_5 = dataclasses.replace(
    NEXT,
    model_type="qwen3_5_text",
    initializer_range=0.1,
    linear=Linear(
        key_heads=2,
        value_heads=4,
        key_dim=8,
        value_dim=12,
        width=4,
        period=(True, False),
        split=True,
    ),
    experts=None,
)

# The same with experts.
QWEN3_5_MOE = dataclasses.replace(QWEN3_5, model_type="qwen3_5_moe_text", experts=NEXT.experts)


def model() -> Model:
    return decoder(CONFIG)


def params(seed: int = 0, *, config: DecoderConfig = CONFIG) -> Params:
    return drawn(decoder(config).specs, seed)


def drawn(specs: spec.Specs, seed: int) -> Params:
    """Draws what `spec.init` draws in f32, without a program for each shape."""
    flat = spec.flatten(specs)
    assert len(flat) <= _ARRAYS
    values = {}
    for i, (path, one) in enumerate(flat.items()):
        size = math.prod(one.shape)
        if size <= _MOST:
            row = _normals(seed, 0, count=_ARRAYS, size=_MOST)[i]
        else:
            (row,) = _normals(seed, i, count=1, size=1 << (size - 1).bit_length())
        normal = row[:size].reshape(one.shape)
        value = np.ones_like(normal) if one.scale is None else np.float32(one.scale) * normal
        values[path] = jax.device_put(value)
    return traverse_util.unflatten_dict(values, sep="/")


_ARRAYS = 64  # of a model at most
_MOST = 8192  # parameters of most arrays


@functools.cache
def _normals(seed: int, first: int, *, count: int, size: int) -> np.ndarray:
    """Draws f32[count, size] for the arrays from `first` on. What threefry draws for a place does
    not depend on the shape."""
    return np.asarray(_draw(jax.random.key(seed), first, count=count, size=size))


@functools.partial(jax.jit, static_argnames=("count", "size"))
def _draw(key: jax.Array, first: int, *, count: int, size: int) -> jax.Array:
    keys = jax.lax.dynamic_slice_in_dim(jax.random.split(key, _ARRAYS), first, count)
    return jax.vmap(lambda key: jax.random.normal(key, size, jnp.float32))(keys)


def difference(a: Any, b: Any) -> Any:
    """Subtracts trees of arrays on the host, without a program for each shape."""
    return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), a, b)


def norm(tree: Any) -> float:
    """The Euclidean norm of all arrays of a tree."""
    return math.hypot(*(float(np.linalg.norm(x)) for x in jax.tree.leaves(tree)))


def rollouts(count: int, *, seed: int = 0, longest: int = 12) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt = rng.integers(2, 64, rng.integers(1, longest // 2)).astype(np.int32)
        completion = rng.integers(2, 64, rng.integers(1, longest // 2)).astype(np.int32)
        size = len(completion)
        out.append(
            Rollout(
                prompt=prompt,
                completion=completion,
                logprobs=rng.normal(-4, 0.5, size).astype(np.float32),
                action_mask=rng.random(size) < 0.9,
                version=np.zeros(size, np.int32),
                group=i // 4,
                reward=float(rng.normal()),
            )
        )
    return out


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_checkpoint(directory: Path, *, config: DecoderConfig = CONFIG) -> Path:
    """The model and a tokenizer of single characters, as a Hugging Face checkpoint."""
    huggingface.save(directory, params(config=config), config, dtype=PRESETS["fp32"].wire)
    characters = string.ascii_lowercase + string.digits + " \n.,:;?+-=*/#()$'\"!%&<>"
    names = ["<pad>", "<end>", "<unk>", *characters]
    assert len(names) <= CONFIG.vocab_size
    names += [f"<{i}>" for i in range(CONFIG.vocab_size - len(names))]
    tokenizer = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<end>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory
