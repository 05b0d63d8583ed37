"""Models of the benchmarks, and lengths of prompts and completions."""

import dataclasses

from jaxrl.models import DecoderConfig, Rope

PROMPT, ANSWER = 64, 192  # tokens

_SMALL = DecoderConfig(
    model_type="qwen3",
    vocab_size=4096,
    hidden_size=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=768,
    rms_norm_eps=1e-6,
    rope=Rope(theta=1e6),
    qkv_bias=False,
    qk_norm="head",
    tied=True,
    max_positions=1024,
)
SHAPES = {
    "S": _SMALL,
    "M": dataclasses.replace(
        _SMALL, vocab_size=8192, hidden_size=512, num_layers=12, head_dim=64, intermediate_size=1536
    ),
}
