"""A program compiled for chips, read as text: estimated time and bytes moved, by cause.

The compiler for TPUs writes `estimated_cycles` beside each instruction, but for Pallas kernels, see
`jaxrl.commands.plan.kernels`. The compiler for GPUs has no estimate: there an instruction takes the
time of its products or of its bytes at full rate, the longer of the two.
"""

import collections
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxrl.commands.plan.chips import CHIPS
from jaxrl.commands.plan.kernels import is_kernel, is_splash, kernel_seconds
from jaxrl.sharding import Work, collectives, program_work

_COLLECTIVE = re.compile(r"^(all-|reduce-scatter|collective-|async-)")


class Cost(NamedTuple):
    """Cost of one step on one device."""

    seconds: float = 0.0  # estimated; without communication
    moved: float = 0.0  # bytes read from and written to the device's memory
    least: float = 0.0  # seconds, if every instruction's products or bytes went at full rate

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


def by_cause(
    text: str,
    *,
    chip: str,
    trips: Sequence[int],
    heads: tuple[int, ...],
    head_dim: int,
    head: str = "logprobs",
) -> dict[str, Cost]:
    """Adds up a step by cause, the dearest first; communication is not part of it.

    Args:
      text: of the compiled program.
      chip: its name in `CHIPS`.
      trips: as in `jaxrl.sharding.collectives`.
      heads: numbers of query and key heads on a device.
      head_dim: size of a head.
      head: pattern of the functions and modules of the language model's head and of its loss.
    """
    sheet, sources = CHIPS[chip], _sources(text)
    size = f"({head_dim}|{head_dim // 2})"
    forms = (rf"[\[,]{n},(\d+,){{0,2}}{size}\]|\[\d+,(\d+,)?{n}\]|\[\d+,{n},\d+\]" for n in heads)
    of_heads = re.compile("|".join(forms))
    found: dict[str, Cost] = collections.defaultdict(Cost)
    for work in program_work(text, trips=trips):
        one, moved = work.instruction, work.read + work.written
        if _COLLECTIVE.match(one.kind) or one.kind.endswith(("-done", "-update")):
            continue
        source = sources(one.line)
        bound = max(work.flops / sheet.units["bf16"], moved / (sheet.memory_rate or math.inf))
        seconds = work.cycles / sheet.clock if sheet.clock else bound
        if is_kernel(one):
            seconds = kernel_seconds(work, kind=chip)
        elif work.cycles == 0 and "expert_rows.py" in source:
            seconds = bound  # gathers of rows, for which the compiler has no estimate
        of_head = re.search(head, source) is not None
        cause = _cause(work, source, of_heads=of_heads, head=of_head)
        # Attention's kernels multiply more than their text says.
        found[cause] += Cost(seconds, moved, seconds if is_splash(one) else bound)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def report(found: dict[str, Cost], text: str, *, trips: Sequence[int]) -> Iterator[str]:
    """Yields the lines of a table: each cause, their sum, and what each collective sends."""
    total = sum(found.values(), Cost())
    for cause, cost in {**found, "total": total}.items():
        share = cost.seconds / total.seconds
        moved = f"{cost.moved / 2**30:9.1f} GiB moved"
        yield f"{cause:36}{cost.seconds:8.4f} s {share:5.1%}{moved}{cost.least:8.4f} s at full rate"
    for kind, one in collectives(text, trips=trips).items():
        yield f"{kind:36}{one.sent / 2**30:8.2f} GiB sent in {one.count}"


def _cause(work: Work, source: str, *, of_heads: re.Pattern[str], head: bool) -> str:
    """Names the cause of an instruction, from what it is and the functions that it comes from."""
    one, windowed = work.instruction, "windowed_dot" in work.computation
    if "__cudnn" in one.line or is_splash(one):
        return "attention's kernels"
    if one.name.startswith("ragged-dot") or "grouped.py" in source:
        return "products of the experts"
    if "gather" in one.name and "expert_rows.py" in source:
        return "order of experts' rows"
    if is_kernel(one):
        return "norm, rope and order of heads" if "heads.py" in source else "other kernels"
    if work.flops:
        if head:
            return "products of the head"
        if "rematted_computation" in source:
            return "products that remat repeats"
        return "products in windowed einsums" if windowed else "products of the layers"
    if windowed:
        return "windowed einsums besides products"
    if re.search(r"_apply|optax|optimizer| jit\(\w+\)/(?!.*(while|jvp))", source):
        return "optimizer"  # and the metrics of the update, which XLA computes in the same pass
    if head:
        return "loss besides products"
    if of_heads.search(one.shape) or "heads_on_gpu" in source:
        return "norm, rope and order of heads"
    if one.name.startswith(("copy", "transpose")):
        return "copies"
    if one.name.startswith(("convert", "loop_convert")):
        return "converts"
    if re.search(r"gated|silu", source):
        return "gated unit"
    return "norms of the stream" if "norm" in source else "other"


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
