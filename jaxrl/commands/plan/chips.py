"""Chips by their vendors' data sheets, and the rate of a dtype policy's products on them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl.core import Precision, short_name

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of jax, by its vendor's data sheet; None for an unknown rate."""

    memory: float  # bytes
    devices: int = 1  # that jax sees on one chip
    # FLOPs per second of dense products, by the operands that the chip's units multiply.
    units: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory_rate: float | None = None  # memory bandwidth in bytes per second
    link_rate: float | None = None  # bytes per second that it sends over all its links
    clock: float | None = None  # cycles per second of its matrix units at the rate in `units`


def _chip(
    *, gib: float, tflops: Mapping[str, float], memory_tbs: float, links_gbs: float, **others: Any
) -> Chip:
    return Chip(
        memory=gib * GIB,
        units={operands: rate * 1e12 for operands, rate in tflops.items()},
        memory_rate=memory_tbs * 1e12,
        link_rate=links_gbs * 1e9,
        **others,
    )


def _tpu(*, tflops: float, per_cycle: int, **sheet: Any) -> Chip:
    return _chip(tflops={"bf16": tflops}, clock=tflops * 1e12 / per_cycle, **sheet)


def _gpu(*, tflops: tuple[float, float, float], **sheet: Any) -> Chip:
    tensor, tf32, f32 = tflops
    rates = {"bf16": tensor, "f16": tensor, "tf32": tf32, "f32": f32}
    return _chip(tflops=rates, **sheet)


# https://cloud.google.com/tpu/docs, the pages v5e, v5p, v6e and tpu7x in November 2026. Memory is
# the part of the 16, 95, 32 and 192 GB that XLA lets a program use. Links are in one direction. A
# tpu7x has two devices, each with half of it. FLOPs per cycle are two for each cell of
# its matrix units: 4 of 128 x 128 on a v5e, 8 on a v5p, 4 of 256 x 256 on the others.
TPUS: Mapping[str, Chip] = {
    "v5e": _tpu(gib=15.75, tflops=197, memory_tbs=0.819, links_gbs=200, per_cycle=2**17),
    "v5p": _tpu(gib=95.74, tflops=459, memory_tbs=2.765, links_gbs=600, per_cycle=2**18),
    "v6e": _tpu(gib=31.25, tflops=918, memory_tbs=1.638, links_gbs=400, per_cycle=2**19),
    "tpu7x": _tpu(
        gib=94.75, tflops=2307 / 2, memory_tbs=7.38 / 2, links_gbs=300, per_cycle=2**19, devices=2
    ),
}


# NVIDIA's data sheets "A100 80GB Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU",
# each SXM, and "Blackwell" (HGX B200). Tensor cores without sparsity; NVLink in one direction.
# Memory is the part of the 80, 80, 141 and 180 GB that the driver shows.
GPUS: Mapping[str, Chip] = {
    "a100": _gpu(gib=79.1, tflops=(312, 156, 19.5), memory_tbs=2.039, links_gbs=300),
    "h100": _gpu(gib=79.1, tflops=(989.4, 494.7, 67), memory_tbs=3.35, links_gbs=450),
    "h200": _gpu(gib=139.8, tflops=(989.4, 494.7, 67), memory_tbs=4.8, links_gbs=450),
    "b200": _gpu(gib=178.3, tflops=(2250, 1100, 75), memory_tbs=7.7, links_gbs=900),
}

CHIPS: Mapping[str, Chip] = {**TPUS, **GPUS}


class Products(NamedTuple):
    """The way that a chip computes the products of a dtype policy."""

    operands: str  # of the program, such as "f32"
    units: str  # operands that the units multiply, such as "bf16"
    passes: int  # products of the units for one of the program
    rate: float  # FLOPs of the program per second

    def __str__(self) -> str:
        if self.passes > 1:
            return f"{self.operands} operands in {self.passes} passes of {self.units}"
        if self.operands != self.units:
            return f"{self.operands} operands in one pass of {self.units}"
        return f"{self.operands} operands in one pass"


def products(precision: Precision, chip: Chip) -> Products | None:
    """Returns how a chip computes the learner's products; None if its data sheet does not tell."""
    operands = short_name(precision.compute)
    exact = operands != "f32" or precision.products == "exact"
    if exact and operands in chip.units:
        units, passes = operands, 1
    else:
        units, passes = "bf16" if exact else precision.products.split("x")[0], precision.bf16_passes
    if units not in chip.units or not passes:
        return None
    return Products(operands, units, passes, chip.units[units] / passes)
