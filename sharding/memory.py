"""Bytes that a compiled program moves from and to device memory, read from its HLO text."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxrl.sharding import hlo

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_VIEWS = ("bitcast", "bitcast-convert", "reshape", "get-tuple-element")  # inside a fusion
_CONTROL = re.compile(r" (?:while|conditional|call)\(")
_NAMES = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota")


class MemoryTraffic(NamedTuple):
    """Bytes of device memory in one run of a program."""

    read: float
    written: float


class _Instruction(NamedTuple):
    shape: str
    kind: str
    operands: list[str]
    line: str
    root: bool

    @property
    def size(self) -> float:
        """Bytes of its result in device memory."""
        return sum(array.size for array in hlo.arrays(self.shape) if array.in_memory)

    @property
    def numbers(self) -> float:
        """Bytes of its result in any memory."""
        return sum(array.size for array in hlo.arrays(self.shape))


_Computation = Mapping[str, _Instruction]


def memory_traffic(text: str, *, trips: Callable[[int], int]) -> MemoryTraffic:
    """Counts the bytes that the instructions of a program read and write.

    A fusion that slices or gathers from an array reads the elements taken, any other fusion the
    whole array once. Updates in place move the elements changed. All branches of a conditional
    count.

    Args:
      text: of a compiled program (`Compiled.as_text`).
      trips: depth -> iterations, as for `collectives`.
    """
    program = {name: _parse(body) for name, body in hlo.computations(text)[1].items()}
    read = written = 0.0
    for name, line, times in hlo.executed(text, trips=trips, enters=_CONTROL.search):
        if _CONTROL.search(line):
            continue
        for one in _parse([line]).values():
            if one.kind not in _NAMES and not one.kind.endswith("-done"):
                more = _moved(one, program[name], program)
                read, written = read + times * more.read, written + times * more.written
    return MemoryTraffic(read, written)


def _parse(body: list[str]) -> _Computation:
    found = {}
    for line in body:
        if match := _INSTRUCTION.match(line):
            root, name, shape, kind, rest = match.groups()
            operands = [] if kind in ("parameter", "constant") else _operands(rest)
            found[name] = _Instruction(shape, kind, operands, line, root is not None)
    return found


def _operands(rest: str) -> list[str]:
    """Lists the operands of an instruction, from the text after its opening parenthesis."""
    depth = 1
    for end, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return re.findall(r"%([\w.\-]+)", rest[:end])
    return []


def _moved(
    one: _Instruction, inside: _Computation, program: Mapping[str, _Computation]
) -> MemoryTraffic:
    operands = [inside[name] for name in one.operands if name in inside]
    if one.kind == "fusion":
        fused = program[next(hlo.called(one.line))]
        read = 0.0
        for number, operand in enumerate(operands):
            part = _read_inside(_parameter(fused, number), fused, program)
            read += operand.size if part is None else min(part, operand.size)
        return MemoryTraffic(read, _written_by_root(one, fused, program))
    if one.kind.endswith("-start"):
        # The shape lists source, destination and a flag; a copy's lists the destination first.
        source, target = hlo.arrays(one.shape)[:2]
        if one.kind == "copy-start":
            source, target = target, source
        moved = min(source.size, target.size)
        return MemoryTraffic(moved * source.in_memory, moved * target.in_memory)
    if one.kind in ("dynamic-slice", "slice", "gather"):
        return MemoryTraffic(min(one.numbers, operands[0].size), one.size)
    if (update := _update(one)) is not None and update in inside:
        changed = min(inside[update].numbers, one.size)
        return MemoryTraffic(inside[update].size, changed)
    return MemoryTraffic(sum(operand.size for operand in operands), one.size)


def _update(one: _Instruction) -> str | None:
    """Names the operand that an update in place writes."""
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(one.kind)
    return None if place is None else one.operands[place]


def _parameter(fused: _Computation, number: int) -> str:
    return next(
        name
        for name, one in fused.items()
        if one.kind == "parameter" and f" parameter({number})" in one.line
    )


def _read_inside(
    name: str, fused: _Computation, program: Mapping[str, _Computation]
) -> float | None:
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
                    inner = program[next(hlo.called(one.line))]
                    part = _read_inside(_parameter(inner, place), inner, program)
                    if part is None and not _is_view(inner):
                        return None
                    if part is None:
                        views.append(user)
                    else:
                        read += part
                elif _update(one) is None or place != 0:
                    return None
    return read


def _is_view(fused: _Computation) -> bool:
    return all(one.kind in (*_VIEWS, "parameter") for one in fused.values())


def _written_by_root(
    one: _Instruction, fused: _Computation, program: Mapping[str, _Computation]
) -> float:
    root = next(inner for inner in fused.values() if inner.root)
    while root.kind in ("bitcast", "bitcast-convert"):
        root = fused[root.operands[0]]
    if root.kind == "fusion":
        return _written_by_root(one, program[next(hlo.called(root.line))], program)
    if (update := _update(root)) is not None:
        return min(fused[update].numbers, one.size)
    return one.size
