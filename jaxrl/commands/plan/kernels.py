"""Time of the Pallas kernels in a TPU's program, for which its compiler has no estimate."""

import math
import re
from collections.abc import Sequence

from jaxrl.commands.plan.chips import TPUS
from jaxrl.sharding import Instruction, Work

# Bundles of jax's splash attention for 512 queries, 512 keys and one head: forward, gradient of
# queries, and of keys and values. Counted in its final schedule (docs/results/chips.md).
_BUNDLES = {
    "v5e": (1133, 1524, 1906),
    "v5p": (1140, 1508, 1924),
    "v6e": (981, 1182, 1409),
    "tpu7x": (981, 1182, 1409),  # of v6e: not counted
}
# The same for `models.attention.splash_forward` and `splash_gradient`, which hold a head of a row:
# of a block in which every score counts, of another one, and of all else in 4,096 tokens.
_ROWS = {
    "forward": {
        "v5e": (1086, 1192, 3724),
        "v5p": (1083, 1197, 3825),
        "v6e": (674, 909, 3187),
        "tpu7x": (608, 886, 2822),
    },
    "gradients": {
        "v5e": (2280, 2514, 4115),
        "v5p": (2209, 2558, 4241),
        "v6e": (1471, 1754, 3204),
        "tpu7x": (1434, 1791, 3186),
    },
}
_CORES = {"v5p": 2}
_BLOCK, _AROUND = 512, 1.285  # the second: steps of splash's kernels around its blocks


def is_kernel(one: Instruction) -> bool:
    """Tells if an instruction is a Pallas kernel of a TPU's program, and does not only read from
    one, whose name is then in its line too."""
    return one.kind == "custom-call" and "tpu_custom_call" in one.line


def is_splash(one: Instruction) -> bool:
    """Tells if an instruction is a kernel of splash attention."""
    return is_kernel(one) and _splash_name(one) != ""


def _splash_name(one: Instruction) -> str:
    """Returns the kernel's own name, which the instruction has only outside of a loop over rows."""
    operation = re.search(r'op_name="([^"]*)"', one.line)
    names = re.findall(r"splash_m[hq]a_\w+", f"{operation[1] if operation else ''} {one.name}")
    return names[-1] if names else ""


def kernel_seconds(work: Work, *, kind: str) -> float:
    """Estimates the seconds of an instruction that is a Pallas kernel, in all its executions; 0 for
    any other. A kernel whose bundles were not counted takes the time of its products or of its
    bytes at full rate, the longer of the two. `kind` is the TPU's name in `TPUS`."""
    if is_splash(work.instruction):
        return work.times * _splash(work.instruction, work.shapes, kind)
    moved = (work.read + work.written) / (TPUS[kind].memory_rate or math.inf)
    multiplied = work.flops / TPUS[kind].units["bf16"]
    return max(moved, multiplied) if is_kernel(work.instruction) else 0.0


def _splash(one: Instruction, shapes: Sequence[tuple[int, ...]], kind: str) -> float:
    """Estimates the seconds of a call of splash attention, from the shapes of the arrays that it
    reads: lists of blocks [1, queries, keys], of all rows in one direction and of one in the other,
    then queries [H, rows * T, head_dim] and keys [K, rows * S, head_dim]. T is less than S where
    devices divide the rows: the last one, which sees the most blocks, is counted."""
    name = _splash_name(one)
    if of_rows := _ROWS.get(name.removeprefix("splash_mha_").rstrip("_")):
        bundles = _of_rows(shapes, *of_rows[kind])
        return bundles / (TPUS[kind].clock or math.inf) / _CORES.get(kind, 1)
    listed, *arrays = (shape for shape in shapes if len(shape) == 3)
    (heads, queries, _), (_, keys, _), *_ = (shape for shape in arrays if shape != listed)
    forward, dq, dkv = _BUNDLES[kind]
    bundles = dq if "_dq" in name else dkv if "dkv" in name else forward
    rows = keys / listed[2] / queries * listed[1]  # if the lists are of the queries of all rows
    rows = max(1.0, 1 / rows if "dkv" in name else rows)
    seen, of_keys = queries / rows / _BLOCK, keys / rows / _BLOCK
    blocks = heads * rows * seen * (of_keys - (seen - 1) / 2)
    return blocks * bundles * _AROUND / (TPUS[kind].clock or math.inf) / _CORES.get(kind, 1)


def _of_rows(shapes: Sequence[tuple[int, ...]], whole: int, masked: int, rest: int) -> float:
    """Counts the bundles of a call of a kernel that holds a head of a row, from the arrays that it
    reads: queries [H, B * T, hd], keys [K, B * S, hd], and last the keys' sequences [B, S, 128].
    Each row counts as one sequence, of which the last device has the end, as in `_splash`."""
    arrays = [shape for shape in shapes if len(shape) == 3]
    (heads, queries, _), (rows, keys, _) = arrays[0], arrays[-1]
    seen, of_keys = queries / rows / _BLOCK, keys / _BLOCK
    blocks = seen * (of_keys - (seen - 1) / 2) - seen
    return heads * rows * (blocks * whole + seen * masked + rest * queries / rows / 4096)
