"""The processor of this machine, as far as XLA's sums on it depend on it."""

import functools
from pathlib import Path


@functools.cache
def may_multiply_bf16() -> bool:
    """True if this processor may have units for products of bf16, such as tiles of rows."""
    file = Path("/proc/cpuinfo")
    return has_bf16_units(file.read_text(encoding="utf-8") if file.exists() else "")


def has_bf16_units(cpuinfo: str) -> bool:
    """Tells from the content of /proc/cpuinfo if there may be units for products of bf16: AMX or
    AVX-512 BF16 on x86-64, and any on a processor that is not described as one of x86-64.

    Example:
      >>> has_bf16_units("flags : avx2 avx512f"), has_bf16_units("flags : avx2 amx_bf16")
      (False, True)
      >>> has_bf16_units("")
      True
    """
    flags = set(cpuinfo.split())
    return not flags.isdisjoint({"amx_bf16", "avx512_bf16"}) or "avx2" not in flags
