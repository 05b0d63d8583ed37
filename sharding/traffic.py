"""Communication volume of a compiled program, parsed from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Sequence

from jaxrl.sharding import hlo

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_OP = re.compile(rf"= (?P<shape>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one run of a program."""

    count: int = 0  # collectives started
    size: float = 0.0  # bytes of their results on one device; for a reduce-scatter, of its input
    sent: float = 0.0  # bytes that one device sends with ring algorithms, which need the fewest

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.size + other.size, self.sent + other.sent)


def collectives(text: str, *, trips: Sequence[int] = ()) -> dict[str, Traffic]:
    """Counts traffic by kind; a collective in a loop counts once per iteration.

    Args:
      text: of a compiled program (`Compiled.as_text`).
      trips: iterations of the loops that end by their data, by the number of such loops around
        them. Loops that count to a constant are read.

    Returns:
      The kinds that occur.

    Raises:
      ValueError: for a loop whose iterations are not known.
    """
    found: dict[str, Traffic] = {}
    program = hlo.parse(text)
    for name, run, times in hlo.executed(program, trips=trips, enters=lambda one: True):
        if match := _OP.search(run.line):
            kind, one = _traffic(run.line, match, inside=name)
            whole = Traffic(times * one.count, times * one.size, times * one.sent)
            found[kind] = found.get(kind, Traffic()) + whole
    return {kind: found[kind] for kind in KINDS if kind in found}


def _traffic(line: str, match: re.Match[str], *, inside: str) -> tuple[str, Traffic]:
    kind, group = match["kind"], _group_size(line)
    sizes = [array.size for array in hlo.arrays(match["shape"])]
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
