"""Models of the benchmarks, and lengths of prompts and completions."""

import dataclasses

from jaxrl.commands.bench.sizes import SMALL

PROMPT, ANSWER = 64, 192  # tokens

_SMALL = dataclasses.replace(SMALL, num_layers=6)
SHAPES = {
    "S": _SMALL,
    "M": dataclasses.replace(
        _SMALL, vocab_size=8192, hidden_size=512, num_layers=12, head_dim=64, intermediate_size=1536
    ),
}
