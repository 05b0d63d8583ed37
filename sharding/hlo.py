"""The text of compiled programs: computations, loops and the sizes of arrays."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Array(NamedTuple):
    """One array of a shape."""

    size: float  # bytes, without padding
    in_memory: bool  # the device's main one, not e.g. the VMEM of a TPU


def arrays(shape: str) -> list[Array]:
    """Lists the arrays of a shape, e.g. of "(f32[8]{0}, bf16[2,4]{1,0:T(8,128)S(1)})"."""
    return [
        Array(_bytes(dtype, dimensions), "S(" not in layout)
        for dtype, dimensions, layout in _ARRAY.findall(shape)
    ]


def computations(text: str) -> tuple[str, Mapping[str, list[str]]]:
    """Divides a program; returns the name of its entry and the lines of each computation."""
    entry, name, found = "", "", {}
    for line in text.splitlines():
        if line and not line[0].isspace() and (match := _HEADER.match(line)):
            name = match[2]
            found[name] = []
            entry = name if match[1] else entry
        elif name and line.startswith(" "):
            found[name].append(line)
    return entry, found


def executed(
    text: str, *, trips: Callable[[int], int], enters: Callable[[str], object]
) -> Iterator[tuple[str, str, int]]:
    """Yields (computation, instruction, number of executions) for the instructions that a program
    runs. `trips` is an argument of `collectives`; instructions that are not entered call nothing.
    """
    entry, found = computations(text)
    todo = [(entry, 1, 0)]
    while todo:
        name, times, depth = todo.pop()
        for line in found.get(name, ()):
            yield name, line, times
            inner, deeper = times, depth
            if " while(" in line:
                known = _trip_count(line, found)
                inner = times * (trips(depth) if known is None else known)
                deeper = depth + (known is None)
            if enters(line):
                todo += [(one, inner, deeper) for one in called(line)]


def called(line: str) -> Iterator[str]:
    """Yields the computations that an instruction runs."""
    yield from _CALLED.findall(line)
    for group in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in group.split(","))


def _trip_count(line: str, found: Mapping[str, list[str]]) -> int | None:
    """Returns the iterations of a while loop; None if the computations `found` of the program have
    no constant for it."""
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(match[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    body = found.get(condition[1], []) if condition else []
    numbers = dict(re.findall(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", "\n".join(body)))
    for instruction in body:
        # A scan counts from 0 up to a constant.
        match = re.search(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", instruction)
        if match and match[1] in numbers:
            return int(numbers[match[1]])
    return None


def _bytes(dtype: str, dimensions: str) -> float:
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 0)
    return bits / 8 * math.prod(int(n) for n in dimensions.split(",") if n)
