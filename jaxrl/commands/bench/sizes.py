"""The default work of `jaxrl bench`: a model, and sizes, by kind of device."""

import dataclasses
from typing import Any

from jaxrl.models import DecoderConfig, Rope

# Qwen3-0.6B's shape. A CPU gets one that takes seconds.
QWEN3 = DecoderConfig(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    rms_norm_eps=1e-6,
    rope=Rope(theta=1e6),
    qkv_bias=False,
    qk_norm="head",
    tied=True,
    max_positions=40960,
)
SMALL = dataclasses.replace(
    QWEN3,
    vocab_size=4096,
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=768,
    max_positions=1024,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of the work; lengths in tokens."""

    row: int  # of a row of the learner's batch
    sequence: int  # of a sequence in it, prompt and completion
    prompt: int  # of it
    microbatches: int  # rows of a step
    sequences: int  # completions that are sampled at once
    completion: int  # of one of them
    repetitions: int  # timed, after one that compiles; the fastest counts
    remat: str
    attention: Any  # a kernel, or "auto"


ACCELERATOR = Work(
    row=8192,
    sequence=1024,
    prompt=256,
    microbatches=4,
    sequences=256,
    completion=256,
    repetitions=4,
    remat="matmuls",
    attention="auto",
)
CPU = dataclasses.replace(
    ACCELERATOR,
    row=512,
    sequence=256,
    prompt=64,
    microbatches=2,
    sequences=16,
    completion=32,
    repetitions=2,
)
