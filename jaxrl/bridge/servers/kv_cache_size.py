"""Room for keys and values in a server: how much it gets, and how many answers that holds."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.models.families import DecoderConfig

_LEAST = 256 << 20
_BLOCK = {"cpu": 128, "cuda": 16}  # tokens that vLLM gives at a time
_OTHERWISE = re.compile(r"--?(tensor-parallel|tp|pipeline-parallel|pp|kv-cache|block-size)\b")


class Room(NamedTuple):
    """What a server is started with.

    Attributes:
      size: bytes for keys and values; None leaves it to vLLM.
      note: what to say of it to the user; None if all answers have room.
    """

    size: int | None
    note: str | None = None


def token_bytes(model: DecoderConfig, dtype: np.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize


def make_room(
    given: int | None,
    *,
    key: str,
    model: DecoderConfig,
    dtype: np.dtype,
    device: str,
    tokens: int | None,
    answers: int,
    arguments: Sequence[str],
    free: int,
) -> Room:
    """Room for the answers that are asked for at a time, or as many as there is memory for.

    Args:
      given: bytes, as the config says; None takes what the answers need, but no more than a quarter
        of what is free unless one answer needs more. On a GPU that is left to vLLM, which takes
        what the device has.
      key: the name of `given` in the config.
      model: the model that is served.
      dtype: of keys and values.
      device: "cpu" or "cuda".
      tokens: of the longest prompt with its answer; None for the model's own limit.
      answers: that are asked for at a time.
      arguments: further ones of vLLM; where they change what a token takes, `given` is taken as it
        is.
      free: bytes of memory.

    Raises:
      ValueError: if `given`, or what is free, does not hold one answer.
    """
    if given is None and device == "cuda":
        return Room(None)
    if given is not None and any(_OTHERWISE.match(argument) for argument in arguments):
        return Room(given)
    tokens = tokens or model.max_positions
    block = _BLOCK[device] * token_bytes(model, dtype)
    blocks = -(-tokens // _BLOCK[device])
    one = (blocks + 1) * block  # vLLM keeps a block for itself
    if given is None:
        if one > free:
            raise ValueError(
                f"an answer of up to {tokens} tokens with its prompt needs {one:,} bytes of keys "
                f"and values, and {free:,} are free; make answers or prompts shorter"
            )
        given = max(_LEAST, one, min((answers * blocks + 1) * block, free // 4))
    held = given // block - 1
    # Layers that see a window need less than this says.
    if held < blocks and not any(model.windows):
        raise ValueError(
            f"{key} = {given} holds {max(0, held) * _BLOCK[device]} tokens, one answer with its "
            f"prompt needs {tokens}; set it to {one} or more, or leave it out"
        )
    if (fit := max(1, held // blocks)) >= answers:
        return Room(given)
    return Room(
        given,
        f"{key} = {given} holds {fit} answers of full length, and vLLM is asked for up to "
        f"{answers} at a time: the others wait",
    )


def free_memory() -> int:
    """Bytes that a new process can have."""
    info = Path("/proc/meminfo")
    if info.exists():
        found = dict(line.split(":", 1) for line in info.read_text().splitlines())
        return int(found["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
