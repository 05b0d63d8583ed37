"""The switch of jaxrl's own kernels for NVIDIA GPUs.

Triton compiles them, and XLA's own programs compute the same. JAXRL_GPU_KERNELS=0 leaves the
kernels out, for a GPU on which one fails or is slower. docs/results/chips.md says what they save.
"""

import os
from collections.abc import Callable
from typing import Any

SWITCH = "JAXRL_GPU_KERNELS"


def on_nvidia(kernel: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns a kernel as the argument of `lax.platform_dependent` for NVIDIA GPUs; no argument if
    kernels are left out."""
    return {} if os.environ.get(SWITCH) == "0" else {"cuda": kernel}
