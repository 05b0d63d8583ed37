"""Compiles the rows of the tables in docs/scale.md and writes the tables.

python scripts/experiments/plan_table.py --only qwen3_8b        # rows with this in their name
python scripts/experiments/plan_table.py --write docs/scale.md  # tables of the compiled rows

Needs libtpu, no TPU, and some minutes a row. Rows in --results are not compiled again.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands.plan.topology import GIB, open_topology
from jaxrl.config import toml_file
from jaxrl.config.training import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run of configs/qwen3_8b.toml with changes.

    Attributes:
      model: a directory under configs/models.
      topology: see `jaxrl plan`.
      mesh: axis -> size.
      precision: dtype policy.
    """

    model: str
    topology: str
    mesh: Mapping[str, int]
    precision: str = "bf16_master"

    @property
    def name(self) -> str:
        """Name of the row in the results."""
        return f"{self.model} {self.topology} {self.precision}"

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yields the changed keys: two microbatches of one row on every shard."""
        for axis, size in self.mesh.items():
            yield f"mesh.{axis}", str(size)
        yield "model.path", f"configs/models/{self.model}"
        yield "precision", self.precision
        shards = math.prod(size for axis, size in self.mesh.items() if axis != "tensor")
        yield "train.train_batch", str(2 * shards // 8)


_SCALED, _OTHER_SIZES = "qwen3_8b", (("v5p:2x2x4", 16), ("v5p:4x8x8", 256), ("v5p:8x8x8", 512))
_MODELS = (
    ("qwen3_0_6b", "v5e:2x4", {"fsdp": 8}),
    (_SCALED, "v5p:4x4x4", {"fsdp": 64}),
    ("qwen3_14b", "v5p:4x4x4", {"fsdp": 64}),
    ("qwen3_30b_a3b", "v5p:4x4x4", {"fsdp": 8, "expert": 8}),
    ("llama3_70b", "v5p:4x4x8", {"fsdp": 64, "tensor": 2}),
)
ROWS = [
    *(
        Row(model=model, topology=topology, mesh=mesh, precision=precision)
        for precision in ("bf16_master", "fp16_master")
        for model, topology, mesh in _MODELS
    ),
    *(Row(model=_SCALED, topology=name, mesh={"fsdp": chips}) for name, chips in _OTHER_SIZES),
]


def measure(row: Row) -> dict[str, object]:
    """Compiles one row and returns its results."""
    config = toml_file.load(Config, file="configs/qwen3_8b.toml", overrides=list(row.keys()))
    topology = open_topology(row.topology)

    from jaxrl.commands.plan.program import compile_step  # after JAX has its platform
    from jaxrl.commands.plan.roofline import roofline
    from jaxrl.commands.plan.text import fits, peak, plan_text

    program = compile_step(config, topology)
    print(plan_text(config, topology, program, link_rate=50e9), flush=True)
    return dataclasses.asdict(row) | {
        "name": row.name,
        "peak": program.memory.peak,
        "run": peak(program),
        "of": topology.chip.memory,
        "fits": fits(program, topology),
        "memory": None if program.rejected else dataclasses.asdict(program.memory),
        "traffic": {k: dataclasses.asdict(v) for k, v in program.traffic.items()},
        "roofline": dataclasses.asdict(roofline(program, topology.chip, remat="layer")),
        "kernel": program.step.kernel,
        "hlo_bytes": program.hlo_bytes,
        "seconds": program.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/plan_table.jsonl"))
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--write", type=Path, help="write the tables between the marks in this file"
    )
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    done = (
        [json.loads(line) for line in args.results.read_text().splitlines()]
        if args.results.exists()
        else []
    )
    names = {row["name"] for row in done}
    if args.write:
        before, _, rest = args.write.read_text().partition("<!-- tables -->\n")
        _, _, after = rest.partition("<!-- end -->\n")
        marked = f"<!-- tables -->\n{tables(done)}<!-- end -->\n"
        args.write.write_text(before + marked + after)
        return
    for row in ROWS:
        if args.only in row.name and row.name not in names:
            done.append(measure(row))
            with args.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """Formats both tables as Markdown, with the names of missing rows."""
    found = {row["name"]: row for row in results}
    sizes = sorted(
        (row for row in ROWS if row.model == _SCALED and row.precision == "bf16_master"),
        key=lambda row: math.prod(row.mesh.values()),
    )
    models = ROWS[: -len(_OTHER_SIZES)]
    first = _table("Models on chips where they fit", _MODEL_CELLS, rows=models, found=found)
    head = f"{_SCALED} in bf16_master on 16 to 512 chips"
    return "\n".join([*first, *_table(head, _SIZE_CELLS, rows=sizes, found=found)])


def _table(
    head: str, cells: Mapping[str, Any], *, rows: Sequence[Row], found: Mapping[str, Any]
) -> Iterator[str]:
    yield f"#### {head}\n"
    yield f"| {' | '.join(cells)} |"
    yield "|" + " --- |" * len(cells)
    for row in rows:
        if row.name in found:
            one = found[row.name]
            yield f"| {' | '.join(cell(one) for cell in cells.values())} |"
    yield ""
    if missing := [row.name for row in rows if row.name not in found]:
        yield f"Not compiled: {', '.join(missing)}.\n"


def _memory(key: str) -> Any:
    return lambda row: f"{row['memory'][key] / GIB:.2f}" if row["memory"] else ""


def _temporaries(row: Mapping[str, Any]) -> str:
    kinds = ("gradients", "copies", "activations")
    return f"{sum(row['memory'][kind] for kind in kinds) / GIB:.1f}" if row["memory"] else ""


def _run(row: Mapping[str, Any]) -> str:
    text = f"{row['run'] / GIB:.1f} of {row['of'] / GIB:.1f}"
    return text if row["fits"] else f"**{text}**"


def _sent(*kinds: str) -> Any:
    def cell(row: Mapping[str, Any]) -> str:
        found = row["traffic"]
        return f"{sum(found[kind]['sent'] for kind in kinds or found if kind in found) / GIB:.0f}"

    return cell


def _bound(key: str) -> Any:
    return lambda row: f"{row['roofline'][key]:.2f}" if row["memory"] else ""


def _mesh(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items())


_MEMORY_CELLS = {
    "parameters": _memory("params"),
    "optimizer": _memory("optimizer"),
    "temporaries": _temporaries,
    "peak": lambda row: f"{row['peak'] / GIB:.1f}",
    "run": _run,
}
_MODEL_CELLS = {
    "model": lambda row: row["model"],
    "chips": lambda row: row["topology"],
    "mesh": _mesh,
    "precision": lambda row: row["precision"],
    "attention": lambda row: row["kernel"],
    **_MEMORY_CELLS,
    "sent": _sent(),
    "products, s": _bound("compute"),
    "links, s": _bound("links"),
    "compiled in, s": lambda row: f"{row['seconds']:.0f}",
}
_SIZE_CELLS = {
    "chips": lambda row: row["topology"],
    **_MEMORY_CELLS,
    "all-gather": _sent("all-gather"),
    "all-reduce": _sent("all-reduce"),
    "reduce-scatter": _sent("reduce-scatter"),
    "permute": _sent("collective-permute"),
    "all": _sent(),
    "products, s": _bound("compute"),
    "links, s": _bound("links"),
}

if __name__ == "__main__":
    main()
