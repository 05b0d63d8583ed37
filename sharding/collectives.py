"""Communication volume of a compiled program, parsed from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_OP = re.compile(rf"= (?P<shape>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one run of a program."""

    count: int = 0  # collectives started
    size: float = 0.0  # bytes of their results on one device; for a reduce-scatter, of its input
    sent: float = 0.0  # bytes that one device sends with ring algorithms, which need the fewest

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.size + other.size, self.sent + other.sent)


def collectives(hlo: str, *, trips: Callable[[int], int]) -> dict[str, Traffic]:
    """Counts traffic by kind; a collective in a loop counts once per iteration.

    Args:
      hlo: text of a compiled program (`Compiled.as_text`).
      trips: depth -> iterations, for loops whose trip count the text does not give. Depth is the
        number of such loops around it: 0 for the outermost.

    Returns:
      The kinds that occur.
    """
    entry, computations = _computations(hlo)
    found: dict[str, Traffic] = {}

    def visit(name: str, times: int, depth: int) -> None:
        for line in computations.get(name, ()):
            if match := _OP.search(line):
                kind, one = _traffic(line, match, inside=name)
                whole = Traffic(times * one.count, times * one.size, times * one.sent)
                found[kind] = found.get(kind, Traffic()) + whole
                continue
            inner, deeper = times, depth
            if " while(" in line:
                known = _trip_count(line, computations)
                inner = times * (trips(depth) if known is None else known)
                deeper = depth + (known is None)
            for called in _called(line):
                visit(called, inner, deeper)

    visit(entry, 1, 0)
    return {kind: found[kind] for kind in KINDS if kind in found}


def _computations(hlo: str) -> tuple[str, Mapping[str, list[str]]]:
    entry, name, found = "", "", {}
    for line in hlo.splitlines():
        if line and not line[0].isspace() and (match := _HEADER.match(line)):
            name = match[2]
            found[name] = []
            entry = name if match[1] else entry
        elif name and line.startswith(" "):
            found[name].append(line)
    return entry, found


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for group in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in group.split(","))


def _trip_count(line: str, computations: Mapping[str, list[str]]) -> int | None:
    """Returns the iterations of a while loop; None if the program has no constant for it."""
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(match[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    body = computations.get(condition[1], []) if condition else []
    numbers = dict(re.findall(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", "\n".join(body)))
    for instruction in body:
        # A scan counts from 0 up to a constant.
        match = re.search(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT", instruction)
        if match and match[1] in numbers:
            return int(numbers[match[1]])
    return None


def _traffic(line: str, match: re.Match[str], *, inside: str) -> tuple[str, Traffic]:
    kind, group = match["kind"], _group_size(line)
    sizes = [_bytes(*shape) for shape in _SHAPE.findall(match["shape"])]
    # An async start returns its operands along with its results.
    size = max(sizes) if match["start"] and kind != "all-reduce" else sum(sizes)
    part = (group - 1) / group
    if kind == "all-reduce" and "all-reduce-scatter" in inside:
        return "reduce-scatter", Traffic(1, size, size * part)  # a fusion with the slice after it
    if kind == "reduce-scatter":
        size *= 1 if match["start"] else group
    ring = {"all-reduce": 2 * part, "collective-permute": 1.0}.get(kind, part)
    return kind, Traffic(1, size, size * ring)


def _group_size(line: str) -> int:
    """Number of devices in one collective. XLA writes groups in three formats."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", match[1])}
        return math.prod(sizes[axis] for axis in re.findall(r"'(\w+)'", match[2]))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match[1].split(","))
    return 2  # a permute lists pairs instead


def _bytes(dtype: str, dimensions: str) -> float:
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype.split("e")[0]) or 0)
    return bits / 8 * math.prod(int(n) for n in dimensions.split(",") if n)
