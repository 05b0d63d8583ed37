"""Memory for a server's KV cache, and the number of completions that fit."""

import re
from pathlib import Path

from jaxrl.bridge.manifest import ITEM_BYTES
from jaxrl.bridge.servers.arguments import names
from jaxrl.bridge.servers.launch import ServerOptions
from jaxrl.models.families import DecoderConfig

_MINIMUM = 256 << 20
_BLOCK = {"cpu": 128, "cuda": 16}  # tokens that vLLM allocates together
_CHANGES_SIZE = re.compile(r"--?(tensor-parallel|tp|pipeline-parallel|pp|kv-cache|block-size)\b")


def token_bytes(model: DecoderConfig, dtype: str) -> int:
    """Returns the bytes of one token's keys and values, or latents, in all layers. The states of
    linear layers are not counted, because they do not grow with the tokens."""
    if model.latent is not None:
        numbers = model.latent.kv_rank + model.latent.rope_dim
        return model.num_layers * numbers * ITEM_BYTES[dtype]
    return 2 * model.attention_layers * model.num_kv_heads * model.head_dim * ITEM_BYTES[dtype]


def kv_cache_size(
    options: ServerOptions, *, key: str, model: DecoderConfig, completions: int, free: int
) -> tuple[int | None, str | None]:
    """Sizes the KV cache for the completions that are requested together.

    If `options.kv_cache_bytes` is None, a server on a CPU gets the bytes that all completions need,
    but at most a quarter of the free memory unless one completion needs more. On a GPU the size is
    left to vLLM. A given size is checked unless `options.arguments` change the bytes of a token.

    `key` is the config's name of `kv_cache_bytes`, for messages; `free` is free memory in bytes.
    Raises ValueError if the given size or the free memory does not hold one completion.

    Returns:
      The bytes, None to leave them to vLLM; and a note for the user, None if all completions fit.
    """
    given = options.kv_cache_bytes
    if given is None and options.device == "cuda":
        return None, None
    if given is not None and any(map(_CHANGES_SIZE.match, names(options.arguments))):
        return given, None
    tokens = options.max_model_len or model.max_positions
    block = _BLOCK[options.device] * token_bytes(model, options.dtype)
    blocks = -(-tokens // _BLOCK[options.device])
    one = (blocks + 1) * block  # vLLM reserves a block
    if given is None:
        if one > free:
            raise ValueError(
                f"a prompt with its completion, up to {tokens} tokens, needs {one:,} bytes of KV "
                f"cache, and {free:,} are free; shorten prompts or completions"
            )
        given = max(_MINIMUM, one, min((completions * blocks + 1) * block, free // 4))
    held = given // block - 1
    # Layers with a sliding window need less than computed here.
    if held < blocks and not any(model.windows):
        raise ValueError(
            f"{key} = {given} holds {max(0, held) * _BLOCK[options.device]} tokens, one prompt "
            f"with its completion needs {tokens}; set it to {one} or more, or remove it"
        )
    fit = max(1, held // blocks)
    note = (
        f"{key} = {given} holds {fit} completions of full length; vLLM gets up to {completions} at "
        "once and queues the others"
    )
    return given, None if fit >= completions else note


def free_memory() -> int:
    """Returns the bytes of memory that a new process can use."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["MemAvailable"].split()[0]) << 10
