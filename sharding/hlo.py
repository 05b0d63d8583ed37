"""The text of compiled programs: computations, loops and the sizes of arrays."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Array(NamedTuple):
    """One array of a shape."""

    size: float  # bytes, without padding
    in_memory: bool  # the device's main one, not e.g. the VMEM of a TPU
    dimensions: tuple[int, ...]


def arrays(shape: str) -> list[Array]:
    """Lists the arrays of a shape, e.g. of "(f32[8]{0}, bf16[2,4]{1,0:T(8,128)S(1)})"."""
    found = []
    for dtype, numbers, layout in _ARRAY.findall(shape):
        dimensions = tuple(int(n) for n in numbers.split(",") if n)
        bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 0)
        found.append(Array(bits / 8 * math.prod(dimensions), "S(" not in layout, dimensions))
    return found


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    kind: str
    operands: list[str]
    line: str
    root: bool

    @property
    def size(self) -> float:
        """Bytes of its result in device memory."""
        return sum(array.size for array in arrays(self.shape) if array.in_memory)

    @property
    def numbers(self) -> float:
        """Bytes of its result in any memory."""
        return sum(array.size for array in arrays(self.shape))

    def called(self) -> Iterator[str]:
        """Yields the computations that it runs."""
        yield from _CALLED.findall(self.line)
        for group in _BRANCHES.findall(self.line):
            yield from (name.strip().lstrip("%") for name in group.split(","))


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program by its computations."""

    entry: str
    computations: Mapping[str, Computation]

    def inner(self, fusion: Instruction) -> Computation:
        """Returns the computation of a fusion."""
        return self.computations[next(fusion.called())]


def parse(text: str) -> Program:
    """Parses a compiled program (`Compiled.as_text`)."""
    entry, name = "", ""
    found: dict[str, dict[str, Instruction]] = {}
    # The attributes of a kernel may have lines of their own.
    for line in re.sub(r'\n(?="|\}\})', " ", text).splitlines():
        if line and not line[0].isspace() and (header := _HEADER.match(line)):
            name = header[2]
            found[name] = {}
            entry = name if header[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            root, own, shape, kind, rest = match.groups()
            operands = [] if kind in ("parameter", "constant") else _operands(rest)
            found[name][own] = Instruction(own, shape, kind, operands, line, root is not None)
    return Program(entry, found)


def _operands(rest: str) -> list[str]:
    """Lists the operands of an instruction, from the text after its opening parenthesis."""
    depth = 1
    for end, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return re.findall(r"%([\w.\-]+)", rest[:end])
    return []


def executed(
    program: Program, *, trips: Sequence[int], enters: Callable[[Instruction], object]
) -> Iterator[tuple[str, Instruction, int]]:
    """Yields (computation, instruction, number of executions) for the instructions that a program
    runs; instructions that are not entered call nothing.

    Args:
      program: the parsed program.
      trips: iterations of the loops that end by their data, not at a constant, by the number of
        such loops around them.
      enters: tells if the computations that an instruction calls are run through.

    Raises:
      ValueError: for a loop whose counter cannot be read, or one deeper than `trips`.
    """
    todo = [(program.entry, 1, 0)]
    while todo:
        name, times, depth = todo.pop()
        inside = program.computations.get(name, {})
        for one in inside.values():
            yield name, one, times
            inner, deeper = times, depth
            if one.kind == "while":
                known = trip_count(one, inside, program)
                if known is None and depth == len(trips):
                    raise ValueError(
                        f"the loop {one.name} of the compiled program ends by its data: its "
                        f"iterations are known for {depth} of such loops around each other alone"
                    )
                inner = times * (trips[depth] if known is None else known)
                deeper = depth + (known is None)
            if enters(one):
                todo += [(other, inner, deeper) for other in one.called()]


def trip_count(loop: Instruction, inside: Computation, program: Program) -> int | None:
    """Returns the iterations of a while loop; None for a loop that ends by its data.

    Args:
      loop: the instruction.
      inside: the computation that it stands in.
      program: the program of both.

    Raises:
      ValueError: if the loop counts up to a constant, but not by a constant from a constant.
    """
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(match[1])
    names = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", loop.line)
    if names is None:
        raise ValueError(f"the loop {loop.name} of the compiled program names no condition")
    condition, body = (program.computations[name] for name in names.groups())
    test, scope = root_of(condition), _Scope(condition, program)
    while test.kind == "fusion":
        scope = scope.enter(test)
        test = root_of(scope.inside)
    if test.kind != "compare":
        return None
    counter, limit = (scope.value(name) for name in test.operands)
    if not isinstance(limit, int) or not isinstance(counter, _State):
        return None
    after = _Scope(body, program).element(root_of(body), counter.place)
    start = _Scope(inside, program).element(inside[loop.operands[0]], counter.place)
    if (
        "direction=LT" in test.line
        and isinstance(start, int)
        and isinstance(after, _State)
        and after.place == counter.place
        and after.offset > 0
    ):
        return max(0, -(-(limit - counter.offset - start) // after.offset))
    raise ValueError(f"the loop {loop.name} of the compiled program counts in an unknown way")


def root_of(inside: Computation) -> Instruction:
    """Returns the instruction whose result is the computation's."""
    return next(one for one in inside.values() if one.root)


class _State(NamedTuple):
    """A number that a loop carries, plus a constant."""

    place: int
    offset: int


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A computation whose integers are wanted, with the values of its parameters if it is fused."""

    inside: Computation
    program: Program
    arguments: "Sequence[int | _State | None] | None" = None

    def enter(self, fusion: Instruction) -> "_Scope":
        arguments = [self.value(name) for name in fusion.operands]
        return _Scope(self.program.inner(fusion), self.program, arguments)

    def value(self, name: str) -> int | _State | None:
        """Evaluates a constant, or a carried number plus a constant; None for anything else."""
        one = self.inside[name]
        if one.kind == "constant":
            match = re.search(r"constant\((-?\d+)\)", one.line)
            return int(match[1]) if match else None
        if one.kind == "parameter" and self.arguments is not None:
            return self.arguments[_number(one)]
        if one.kind in ("copy", "bitcast", "convert", "copy-start", "copy-done"):
            return self.value(one.operands[0])
        if one.kind == "fusion":
            scope = self.enter(one)
            return scope.value(root_of(scope.inside).name)
        if one.kind == "get-tuple-element":
            place = int(one.line.split("index=")[1].split(",")[0])
            return self.element(self.inside[one.operands[0]], place)
        if one.kind == "add":
            first, second = (self.value(operand) for operand in one.operands)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, _State) and isinstance(second, int):
                return first._replace(offset=first.offset + second)
            if isinstance(first, int) and isinstance(second, int):
                return first + second
        return None

    def element(self, source: Instruction, place: int) -> int | _State | None:
        """Evaluates one number of a tuple, as `value` does."""
        if source.kind == "tuple":
            return self.value(source.operands[place])
        if source.kind == "fusion":
            scope = self.enter(source)
            return scope.element(root_of(scope.inside), place)
        if source.kind == "parameter" and self.arguments is None:
            return _State(place, 0)
        return None


def _number(parameter: Instruction) -> int:
    return int(parameter.line.split(" parameter(")[1].split(")")[0])


def parameter_of(fused: Computation, number: int) -> Instruction:
    """Returns the parameter of a fused computation with this number."""
    found = (one for one in fused.values() if one.kind == "parameter")
    return next(one for one in found if _number(one) == number)
