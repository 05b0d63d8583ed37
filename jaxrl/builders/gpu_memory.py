"""Memory of a GPU that jax takes when it starts, and that a vLLM server asks for."""

import os
from collections.abc import Sequence

from jaxrl.config.sampler import ServerConfig

_JAX, _VLLM = 0.75, 0.92  # defaults of jax 0.10 and vLLM 0.32
_OPTION = "--gpu-memory-utilization"


def jax_share() -> float:
    """Returns the part of a GPU's memory that jax takes when it starts, if it takes any then."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if found := os.environ.get(name):
            return float(found)
    return _JAX


def check_room(config: ServerConfig) -> None:
    """Raises ValueError if a server that this process starts would find too little memory beside
    jax on a GPU. Both see the same GPUs. `--device-ids` in `vllm_args` leaves the choice to the
    user."""
    later = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("0", "false")
    later = later or os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"
    if config.device == "cpu" or later or _value(config.vllm_args, "--device-ids") is not None:
        return
    ours, theirs = jax_share(), float(_value(config.vllm_args, _OPTION) or _VLLM)
    if ours + theirs > 1:
        raise ValueError(
            f"sampler.device = 'cuda': jax has taken {ours:.0%} of the memory of each GPU that it "
            f"sees, and vLLM asks for {theirs:.0%} of one and would not start. Give the server "
            "a GPU of its own (CUDA_VISIBLE_DEVICES=1 jaxrl serve MODEL --device cuda, and "
            "CUDA_VISIBLE_DEVICES=0 here with sampler.url), or divide the memory: "
            f'XLA_CLIENT_MEM_FRACTION=.5 and sampler.vllm_args = ["{_OPTION}", ".4"]. With '
            "sampler.sleep set XLA_PYTHON_CLIENT_ALLOCATOR=platform"
        )


def _value(arguments: Sequence[str], option: str) -> str | None:
    """Returns the last value of an option among vLLM's arguments; None if it is not given."""
    found = None
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option:
            found = value if equals else following
    return found
