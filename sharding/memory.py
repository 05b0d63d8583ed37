"""Work of a compiled program, read from its HLO text: bytes of device memory and products."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxrl.sharding import hlo
from jaxrl.sharding.hlo import Computation, Instruction, Program

_UNKNOWN = 2**63 - 1  # cycles, of an instruction without an estimate
# Inside a fusion, a slice of one of these reads the same slice of its operand.
_VIEWS = ("bitcast", "bitcast-convert", "copy", "get-tuple-element", "reshape", "transpose")
# Metadata of a Pallas kernel for GPUs may state the bytes that it reads, if it reads only a part of
# its operands, and its products.
_STATED = re.compile(r'serialized_metadata = "\{\\22(bytes|flops)\\22: \\22(\d+)')
# The kernel with which libtpu multiplies groups of rows; another one prepares its lists.
_GROUPED = r"ragged-dot-(?!metadata)"
_CONTROL = ("while", "conditional", "call", "call-start")  # the last on a TPU's SparseCore
_NAMES = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota")


class Work(NamedTuple):
    """Work of one instruction, in all its executions."""

    instruction: Instruction
    computation: str  # that it stands in
    times: int  # executions
    read: float  # bytes of device memory
    written: float
    flops: float  # of its matrix products; of kernels only if their metadata or XLA's name tells
    cycles: float  # as the compiler estimates them; 0 if it does not
    shapes: tuple[tuple[int, ...], ...]  # of the arrays that it gets


class MemoryTraffic(NamedTuple):
    """Bytes of device memory in one run of a program."""

    read: float
    written: float


def memory_traffic(text: str, *, trips: Sequence[int]) -> MemoryTraffic:
    """Counts the bytes that the instructions of a program read and write; see `program_work`."""
    work = list(program_work(text, trips=trips))
    return MemoryTraffic(sum(one.read for one in work), sum(one.written for one in work))


def program_work(text: str, *, trips: Sequence[int]) -> Iterator[Work]:
    """Yields the work of each instruction that a program runs.

    A fusion that slices or gathers from an array reads the elements taken, any other fusion the
    whole array once. Updates in place move the elements changed. All branches of a conditional
    count.

    Args:
      text: of a compiled program (`Compiled.as_text`).
      trips: iterations of the loops that end by their data, as for `collectives`.

    Raises:
      ValueError: for a loop whose iterations are not known.
    """
    program = hlo.parse(text)
    for name, one, times in hlo.executed(
        program, trips=trips, enters=lambda one: one.kind in _CONTROL
    ):
        if one.kind in (*_CONTROL, *_NAMES):
            continue
        inside = program.computations[name]
        read = written = flops = 0.0
        if not one.kind.endswith("-done"):
            read, written = _moved(one, inside, program)
            flops = _flops(one, inside, program)
        cycles = re.search(r'"estimated_cycles":"(\d+)"', one.line)
        estimated = int(cycles[1]) if cycles and int(cycles[1]) < _UNKNOWN else 0
        given = (hlo.arrays(inside[name].shape) for name in one.operands if name in inside)
        shapes = tuple(array.dimensions for found in given for array in found)
        sizes = (times * read, times * written, times * flops, times * estimated)
        yield Work(one, name, times, *sizes, shapes)


def _moved(one: Instruction, inside: Computation, program: Program) -> MemoryTraffic:
    operands = [inside[name] for name in one.operands if name in inside]
    if (stated := _stated(one, "bytes")) is not None:
        return MemoryTraffic(stated, one.size)
    if one.kind == "fusion":
        fused = program.inner(one)
        read = 0.0
        for number, operand in enumerate(operands):
            part = _read_inside(hlo.parameter_of(fused, number).name, fused, program)
            read += operand.size if part is None else min(part, operand.size)
        return MemoryTraffic(read, _written_by_root(one, fused, program))
    if one.kind.endswith("-start") and one.kind != "all-reduce-start":
        # The shape lists sources, destinations and a flag; a copy's lists the destination first.
        # An all-reduce's lists its results alone.
        arrays = hlo.arrays(one.shape)
        sources, targets = arrays[: len(operands)], arrays[len(operands) : 2 * len(operands)]
        if one.kind == "copy-start":
            sources, targets = targets, sources
        read = written = 0.0
        for source, target in zip(sources, targets, strict=False):  # indices come last
            moved = min(source.size, target.size)
            read += moved * source.in_memory
            written += moved * target.in_memory
        return MemoryTraffic(read, written)
    if one.kind in ("dynamic-slice", "slice", "gather"):
        return MemoryTraffic(min(one.numbers, operands[0].size), one.size)
    if (update := _update(one)) is not None and update in inside:
        changed = min(inside[update].numbers, one.size)
        return MemoryTraffic(inside[update].size, changed)
    return MemoryTraffic(sum(operand.size for operand in operands), one.size)


def _stated(one: Instruction, name: str) -> float | None:
    found = _STATED.search(one.line) if one.kind == "custom-call" else None
    return float(found[2]) if found and found[1] == name else None


def _update(one: Instruction) -> str | None:
    """Names the operand that an update in place writes."""
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(one.kind)
    return None if place is None else one.operands[place]


def _read_inside(name: str, fused: Computation, program: Program) -> float | None:
    """Returns the bytes that a fusion reads of one of its arrays; None for the whole array."""
    read, views = 0.0, [name]
    while views:
        view = views.pop()
        if fused[view].root:
            return None
        for user, one in fused.items():
            for place, operand in enumerate(one.operands):
                if operand != view:
                    continue
                if one.kind in _VIEWS:
                    views.append(user)
                elif one.kind in ("dynamic-slice", "slice", "gather") and place == 0:
                    read += one.numbers
                elif one.kind == "fusion":
                    inner = program.inner(one)
                    part = _read_inside(hlo.parameter_of(inner, place).name, inner, program)
                    if part is None and not _is_view(inner):
                        return None
                    if part is None:
                        views.append(user)
                    else:
                        read += part
                elif _update(one) is None or place != 0:
                    return None
    return read


def _is_view(fused: Computation) -> bool:
    return all(one.kind in (*_VIEWS, "parameter") for one in fused.values())


def _written_by_root(one: Instruction, fused: Computation, program: Program) -> float:
    root = hlo.root_of(fused)
    if root.kind == "tuple":
        results = zip(root.operands, hlo.arrays(one.shape), strict=True)
        return sum(
            _written(fused[name], fused, program, size=array.size * array.in_memory)
            for name, array in results
        )
    return _written(root, fused, program, size=one.size)


def _written(result: Instruction, fused: Computation, program: Program, *, size: float) -> float:
    """Returns the bytes that a fusion writes of a result of `size` bytes."""
    while result.kind in ("bitcast", "bitcast-convert"):
        result = fused[result.operands[0]]
    if result.kind == "fusion":
        inner = program.inner(result)
        return _written(hlo.root_of(inner), inner, program, size=size)
    if (update := _update(result)) is not None:
        return min(fused[update].numbers, size)
    return size


def _flops(one: Instruction, inside: Computation, program: Program) -> float:
    if one.kind == "fusion":
        fused = program.inner(one)
        return sum(_flops(inner, fused, program) for inner in fused.values())
    if (stated := _stated(one, "flops")) is not None:
        return stated
    if one.kind == "custom-call" and re.match(_GROUPED, one.name):
        # The operands before the last two are lists of groups. Each row meets one matrix.
        rows = hlo.arrays(inside[one.operands[-2]].shape)[0].dimensions
        return 2.0 * math.prod(rows) * hlo.arrays(one.shape)[0].dimensions[-1]
    if one.kind not in ("dot", "convolution") or any(x not in inside for x in one.operands[:2]):
        return 0.0
    left, right = (hlo.arrays(inside[x].shape)[0].dimensions for x in one.operands[:2])
    result = hlo.arrays(one.shape)[0].dimensions
    if one.kind == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.line)
        summed = [left[int(d)] for d in match[1].split(",") if d] if match else []
    else:
        summed = _summed(one, left, right, result)
    return 2.0 * math.prod(result) * math.prod(summed)


def _summed(
    one: Instruction, left: Sequence[int], right: Sequence[int], result: Sequence[int]
) -> list[int]:
    """Lists the sizes that a convolution, as TPUs write products, sums over."""
    match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.line)
    if match is None:
        return []
    # In the labels, i is the feature that is summed and digits are the window's positions. A window
    # as large as its input with a single result is summed as well; others are batch or free.
    inputs, kernel, outputs = (
        dict(zip(labels, sizes, strict=True))
        for labels, sizes in zip(match.groups(), (left, right, result), strict=True)
    )
    windows = [d for d in kernel if d.isdigit() and outputs[d] == 1 and inputs[d] == kernel[d]]
    return [kernel["i"], *(kernel[d] for d in windows)]
