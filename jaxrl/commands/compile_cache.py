"""Compiled programs kept on disk, so that the second start of a command compiles nothing.

All settings are JAX's own environment variables, and a variable that is set wins:
JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off, JAX_COMPILATION_CACHE_DIR moves it.
"""

import hashlib
import os
import platform
import sys
from pathlib import Path

from jaxrl.core import cache_directory

_DEVICES = "xla_force_host_platform_device_count"
_LARGEST = 4 * 2**30  # bytes; beyond it JAX removes the least recently used programs


def use_compile_cache() -> None:
    """Points JAX at a cache in the user's cache directory; must run before anything compiles.

    Simulated devices get no cache: XLA's CPU backend loses the order of collectives in a program
    that it reads back, and devices may deadlock (docs/internals/xla.md).
    """
    _set("jax_persistent_cache_min_compile_time_secs", 0.0)
    simulated = _DEVICES in os.environ.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in os.environ
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or simulated:
        return
    directory = cache_directory() / "compiled" / processor()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # a missing or read-only home
        return
    _set("jax_compilation_cache_dir", str(directory))
    _set("jax_compilation_cache_max_size", _LARGEST)


def _set(name: str, value: str | float) -> None:
    if name.upper() not in os.environ:
        os.environ[name.upper()] = str(value)
        if "jax" in sys.modules:  # JAX has read its variables already
            sys.modules["jax"].config.update(name, value)


def processor() -> str:
    """Digests the processor's model and features: XLA's CPU programs run only there."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = ("model name", "flags", "Features", "CPU part")
    found = {line for line in lines if line.startswith(named)}
    text = "\n".join([platform.machine(), platform.processor(), *sorted(found)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
