"""The processor of this machine, as far as XLA's sums on it depend on it."""

import functools
from pathlib import Path


@functools.cache
def multiplies_in_tiles() -> bool:
    """True if products of bf16 on this processor may be computed in tiles of rows."""
    file = Path("/proc/cpuinfo")
    return has_tiles(file.read_text(encoding="utf-8") if file.exists() else "")


def has_tiles(cpuinfo: str) -> bool:
    """Tells from the content of /proc/cpuinfo if there may be units for tiles: AMX on x86-64, and
    on any processor that is not described as one of x86-64.

    Example:
      >>> has_tiles("flags : avx2 avx512f"), has_tiles("flags : avx2 amx_bf16"), has_tiles("")
      (False, True, True)
    """
    flags = set(cpuinfo.split())
    return "amx_bf16" in flags or "avx2" not in flags
