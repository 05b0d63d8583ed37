"""Compiled programs kept on disk, so that the second start of a command compiles nothing.

Everything is said in JAX's own environment variables. One that is set already wins:
JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off, JAX_COMPILATION_CACHE_DIR moves it.
"""

import hashlib
import os
import platform
from pathlib import Path

_LARGEST = 4 * 2**30  # bytes; JAX removes the programs that were not used for longest


def use_compile_cache() -> None:
    """Points JAX at a cache below the user's cache directory; must run before JAX is imported."""
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = caches / "jaxrl" / "compiled" / _processor()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that is missing or read-only
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(_LARGEST))


def _processor() -> str:
    """A digest of the processor: XLA compiles for its instructions, and JAX's keys omit them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = ("model name", "flags", "Features", "CPU part")
    found = {line for line in lines if line.startswith(named)}
    text = "\n".join([platform.machine(), platform.processor(), *sorted(found)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
