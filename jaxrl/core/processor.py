"""The processor of this machine, as far as XLA's sums on it depend on it."""

import functools
from pathlib import Path

# Units for matrix products as /proc/cpuinfo names them, the widest first.
_UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


@functools.cache
def may_multiply_bf16() -> bool:
    """True if this processor may have units for products of bf16, such as tiles of rows."""
    return has_bf16_units(_cpuinfo())


@functools.cache
def product_unit() -> str | None:
    """Names this processor's widest unit for matrix products: amx_bf16, avx512_bf16, avx512f or
    avx2; None if it has none of them."""
    return unit_of(_cpuinfo())


def has_bf16_units(cpuinfo: str) -> bool:
    """Tells from the content of /proc/cpuinfo if there may be units for products of bf16: AMX or
    AVX-512 BF16 on x86-64, and any on a processor that is not described as one of x86-64.

    Example:
      >>> has_bf16_units("flags : avx2 avx512f"), has_bf16_units("flags : avx2 amx_bf16")
      (False, True)
      >>> has_bf16_units("")
      True
    """
    return unit_of(cpuinfo) in {"amx_bf16", "avx512_bf16", None}


def unit_of(cpuinfo: str) -> str | None:
    """Finds `product_unit` in the content of /proc/cpuinfo.

    Example:
      >>> unit_of("flags : avx2 avx512f fma")
      'avx512f'
    """
    flags = set(cpuinfo.split())
    return next((unit for unit in _UNITS if unit in flags), None)


def _cpuinfo() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8") if file.exists() else ""
