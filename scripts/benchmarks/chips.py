"""A program compiled for TPUs, read as text: the compiler's own estimate of time, by cause.

The compiler writes `estimated_cycles` beside each instruction. It has none for Pallas kernels.
Splash attention's bundles were counted in its final schedule (docs/chips.md); others take the time
of their bytes at the chip's full bandwidth.
"""

import collections
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxrl.commands.plan.chips import CHIPS
from jaxrl.sharding import hlo

CLOCKS = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}  # Hz

# Bundles of splash attention for 512 queries, 512 keys and one head: forward, gradient of queries,
# of keys and values, of all three at once.
_BUNDLES = {
    "v5e": (1133, 1524, 1906, 2420),
    "v5p": (1140, 1508, 1924, 2420),
    "v6e": (981, 1182, 1409, 1648),
    "tpu7x": (981, 1182, 1409, 1648),  # of v6e: not counted
}
_CORES = {"v5p": 2}
_BLOCK, _AROUND = 512, 1.285  # the second: steps of the kernel around its blocks

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_FIRST = re.compile(r"calls=%?([\w.\-]+)")
_SEEN = ("bitcast", "bitcast-convert", "reshape", "get-tuple-element")
_FREE = (*_SEEN, "parameter", "constant", "tuple", "after-all", "iota", "partition-id", "while")
_COLLECTIVE = re.compile(r"^(all-|reduce-scatter|collective-|async-)")


class Instruction(NamedTuple):
    """One line of a computation."""

    root: bool
    name: str
    shape: str
    op: str
    operands: list[str]
    line: str


class Cost(NamedTuple):
    """Cost of one step on one device."""

    seconds: float = 0.0  # estimated by the compiler
    moved: float = 0.0  # bytes read from and written to the device's memory

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(self.seconds + other.seconds, self.moved + other.moved)


class Program:
    """Computations of a program, by name, each with its instructions by name."""

    def __init__(self, text: str) -> None:
        _, found = hlo.computations(text)
        parsed = {k: [_parse(line) for line in lines] for k, lines in found.items()}
        self.parts = {k: {i.name: i for i in some if i} for k, some in parsed.items()}

    def inner(self, one: Instruction) -> Mapping[str, Instruction]:
        """Returns the computation of a fusion."""
        return self.parts[_FIRST.findall(one.line)[0]]

    def has_product(self, one: Instruction) -> bool:
        """Tells if an instruction is a matrix product, alone or in a fusion."""
        if one.op != "fusion":
            return one.op in ("dot", "convolution")
        return any(self.has_product(other) for other in self.inner(one).values())

    def moved(self, one: Instruction, inside: Mapping[str, Instruction]) -> float:
        """Counts the bytes that an instruction of the computation `inside` moves."""
        given = [inside[name] for name in one.operands if name in inside]
        if one.op == "fusion":
            body = self.inner(one)
            parameters = {_number(i): name for name, i in body.items() if i.op == "parameter"}
            sizes = (self._read(parameters[n], body) for n in range(len(given)))
            read = sum(
                _size(i.shape) if size is None else min(size, _size(i.shape))
                for i, size in zip(given, sizes, strict=True)
            )
            return read + self._written(one, body)
        if one.op.endswith("-start"):
            return sum(x.size * x.in_memory for x in hlo.arrays(one.shape)[:2])
        if one.op in ("dynamic-slice", "slice", "gather"):
            return 2 * _size(one.shape)
        if one.op in ("dynamic-update-slice", "scatter"):
            return 2 * _size(given[-1 if one.op == "scatter" else 1].shape)
        return sum(_size(i.shape) for i in given) + _size(one.shape)

    def _read(self, name: str, body: Mapping[str, Instruction], depth: int = 0) -> float | None:
        """Counts the bytes that a fusion reads of a parameter; None if it reads all of it."""
        total, views = 0.0, [name]
        while views:
            view = views.pop()
            if body[view].root or depth > 8:
                return None
            for user in body.values():
                for place in (n for n, used in enumerate(user.operands) if used == view):
                    if user.op in _SEEN:
                        views.append(user.name)
                    elif user.op in ("dynamic-slice", "slice", "gather") and place == 0:
                        total += sum(x.size for x in hlo.arrays(user.shape))
                    elif user.op == "fusion":
                        deeper = self.inner(user)
                        own = next(k for k, i in deeper.items() if _number(i) == place)
                        if (part := self._read(own, deeper, depth + 1)) is None:
                            return None
                        total += part
                    elif not (user.op in ("dynamic-update-slice", "scatter") and place == 0):
                        return None
        return total

    def _written(self, one: Instruction, body: Mapping[str, Instruction]) -> float:
        """Counts the bytes that a fusion writes: an update in place writes its part."""
        root = next(i for i in body.values() if i.root)
        while root.op in _SEEN and root.operands[0] in body:
            root = body[root.operands[0]]
        if root.op == "fusion":
            return self._written(one, self.inner(root))
        roots = [body[k] for k in root.operands] if root.op == "tuple" else [root]
        total = 0.0
        for i, x in zip(roots, hlo.arrays(one.shape), strict=False):
            updated = i.op == "dynamic-update-slice" and i.operands[1] in body
            part = sum(y.size for y in hlo.arrays(body[i.operands[1]].shape)) if updated else x.size
            total += part * x.in_memory
        return total


def by_cause(
    text: str, *, chip: str, trips: Callable[[int], int], heads: tuple[int, ...], head_dim: int
) -> dict[str, Cost]:
    """Adds up a step by cause, the dearest first; communication is not part of it.

    Args:
      text: of the compiled program.
      chip: its name in `CLOCKS`.
      trips: as in `jaxrl.sharding.collectives`.
      heads: numbers of query and key heads on a device.
      head_dim: size of a head.
    """
    program, sources = Program(text), _sources(text)
    size = f"({head_dim}|{head_dim // 2})"
    forms = (rf"[\[,]{n},(\d+,)?{size}\]|\[\d+,(\d+,)?{n}\]|\[\d+,{n},\d+\]" for n in heads)
    of_heads = re.compile("|".join(forms))
    found: dict[str, Cost] = collections.defaultdict(Cost)
    entered = re.compile(r" (while|conditional|call)\(")
    for name, line, times in hlo.executed(text, trips=trips, enters=entered.search):
        one = program.parts[name].get(m[2]) if (m := _INSTRUCTION.match(line)) else None
        if one is None or one.op in _FREE or _COLLECTIVE.match(one.op) or one.op.endswith("-done"):
            continue
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        seconds = float(cycles[1]) / CLOCKS[chip] if cycles else 0.0
        moved = program.moved(one, program.parts[name])
        if "tpu_custom_call" in line:
            by_bundles = "splash" in one.name
            at_full_rate = moved / (CHIPS[chip].memory_rate or math.inf)
            seconds = _splash(one, program.parts[name], chip) if by_bundles else at_full_rate
        source = sources(line)
        cause = _cause(one, source, program, windowed="windowed_dot" in name, of_heads=of_heads)
        found[cause] += Cost(seconds * times, moved * times)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def _cause(
    one: Instruction, source: str, program: Program, *, windowed: bool, of_heads: re.Pattern[str]
) -> str:
    """Names the cause of an instruction, from what it is and the functions that it comes from."""
    head = "logprobs" in source
    if "tpu_custom_call" in one.line:
        return "attention's kernels" if "splash" in one.name else "norm, rope and order of heads"
    if program.has_product(one):
        if head:
            return "products of the head"
        return "products in windowed einsums" if windowed else "products of the layers"
    if windowed:
        return "windowed einsums besides products"
    if re.search(r"_apply|optax|optimizer", source):
        return "optimizer"
    if head:
        return "loss besides products"
    if of_heads.search(one.shape):
        return "norm, rope and order of heads"
    if one.op in ("copy", "transpose") or one.name.startswith(("copy", "transpose")):
        return "copies"
    if one.op == "convert" or one.name.startswith("convert_element"):
        return "converts"
    if re.search(r"gated|silu", source):
        return "gated unit"
    return "norms of the stream" if "norm" in source else "other"


def _splash(one: Instruction, inside: Mapping[str, Instruction], chip: str) -> float:
    """Estimates a call of splash attention, from the queries [B, H, T, head_dim] that it reads."""
    shapes = (inside[name].shape for name in one.operands if name in inside)
    dims = [re.search(r"\[(\d+),(\d+),(\d+),\d+\]", shape) for shape in shapes]
    queries = max(([int(n) for n in d.groups()] for d in dims if d), key=math.prod)
    blocks = queries[2] / _BLOCK
    blocks = queries[0] * queries[1] * blocks * (blocks + 1) / 2
    forward, dq, dkv, fused = _BUNDLES[chip]
    gradients = one.shape.count(f"{queries[2]},") if "dkv" in one.name else 0
    bundles = dq if "_dq" in one.name else dkv if "dkv" in one.name else forward
    if gradients > 2 and re.search(rf"\[\d+,\d+,{queries[1]},{queries[2]},", one.shape):
        bundles = fused
    return blocks * bundles * _AROUND / CLOCKS[chip] / _CORES.get(chip, 1)


def _parse(line: str) -> Instruction | None:
    if not (m := _INSTRUCTION.match(line)):
        return None
    depth, rest = 1, m[5]
    for end, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            rest = rest[:end]
            break
    known = m[4] in ("parameter", "constant")
    operands = [] if known else re.findall(r"%([\w.\-]+)", rest)
    return Instruction(bool(m[1]), m[2], m[3], m[4], operands, line)


def _number(one: Instruction) -> int | None:
    m = re.search(r" parameter\((\d+)\)", one.line)
    return int(m[1]) if m else None


def _size(shape: str) -> float:
    return sum(x.size for x in hlo.arrays(shape) if x.in_memory)


def _sources(text: str) -> Callable[[str], str]:
    """Returns a function from an instruction to the files and functions that it comes from."""
    tables: dict[str, dict[str, str]] = {}
    for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
        if m := re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE):
            rows = (line.split(" ", 1) for line in m[1].splitlines())
            tables[name] = {number: rest.strip('"') for number, rest in rows}

    def frame(number: str | None) -> str:
        found = []
        while number in tables.get("StackFrames", {}) and len(found) < 8:
            row = dict(re.findall(r"(\w+)=(\d+)", tables["StackFrames"][number]))
            place = tables["FileLocations"][row["file_location_id"]]
            ids = dict(re.findall(r"(\w+)=(\d+)", place))
            file = tables["FileNames"][ids["file_name_id"]].rpartition("/")[2]
            found.append(f"{file}:{tables['FunctionNames'][ids['function_name_id']]}")
            parent = row.get("parent_frame_id")
            number = None if parent == number else parent
        return " ".join(found)

    def source(line: str) -> str:
        m = re.search(r"stack_frame_id=(\d+)", line)
        op = re.search(r'op_name="([^"]*)"', line)
        return f"{frame(m[1] if m else None)} {op[1] if op else ''}"

    return source
