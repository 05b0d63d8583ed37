"""Compiles the rows of the tables in docs/scale.md and writes the tables.

python scripts/experiments/plan_table.py --list                 # names of the rows
python scripts/experiments/plan_table.py --only qwen3_8b        # rows with this in their name
python scripts/experiments/plan_table.py --write docs/scale.md  # tables of the compiled rows

Needs libtpu and jax's CUDA plugin, no TPU and no GPU, and some minutes a row. Rows in --results are
not compiled again.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runs import CONFIGS, config, markdown, write_table

from jaxrl.commands.plan.chips import CHIPS, GIB, products
from jaxrl.commands.plan.topology import open_topology
from jaxrl.core.precision import parse


class Row(NamedTuple):
    """A run of configs/qwen3_8b.toml with changes."""

    model: str  # a directory under configs/models
    topology: str  # see `jaxrl plan`
    mesh: Mapping[str, int]  # axis -> size
    precision: str = "bf16_master"  # dtype policy

    @property
    def name(self) -> str:
        """Name of the row in the results."""
        return f"{self.model} {self.topology} {self.precision}"

    def keys(self) -> Mapping[str, object]:
        """Returns the changed keys: two microbatches of one row on every shard."""
        shards = math.prod(size for axis, size in self.mesh.items() if axis != "tensor")
        group = min(8, 2 * shards)
        mesh = {f"mesh.{axis}": size for axis, size in ({"fsdp": 1} | dict(self.mesh)).items()}
        return mesh | {
            "model.path": CONFIGS / "models" / self.model,
            "precision": self.precision,
            "train.group_size": group,
            "train.train_batch": 2 * shards // group,
        }


_SCALED = "qwen3_8b"
_PODS = (
    Row("qwen3_0_6b", "v5e:2x4", {"fsdp": 8}),
    Row(_SCALED, "v5p:4x4x4", {"fsdp": 64}),
    Row("qwen3_14b", "v5p:4x4x4", {"fsdp": 64}),
    Row("qwen3_30b_a3b", "v5p:4x4x4", {"fsdp": 8, "expert": 8}),
    Row("llama3_70b", "v5p:4x4x8", {"fsdp": 64, "tensor": 2}),
)
_HOSTS = (
    Row("qwen3_0_6b", "v6e:2x4", {"fsdp": 8}),
    Row(_SCALED, "v6e:2x4", {"fsdp": 8}),
    Row(_SCALED, "tpu7x:2x2x1", {"fsdp": 8}),
    Row("qwen3_30b_a3b", "tpu7x:2x2x1", {"fsdp": 8}),
    Row("qwen3_0_6b", "h100:1", {}),
    Row("qwen3_0_6b", "h100:8", {"fsdp": 8}),
    Row(_SCALED, "h100:1", {}),
    Row(_SCALED, "a100:8", {"fsdp": 8}),
    Row(_SCALED, "h100:8", {"fsdp": 8}),
    Row(_SCALED, "h200:8", {"fsdp": 8}),
    Row(_SCALED, "b200:8", {"fsdp": 8}),
    Row("qwen3_30b_a3b", "b200:8", {"fsdp": 8}),
    Row("gemma3_1b", "v5e:2x2", {"fsdp": 4}),
    Row("olmo3_7b", "v6e:2x4", {"fsdp": 8}),
    Row("smollm3_3b", "v6e:2x2", {"fsdp": 4}),
    Row("qwen3_5_9b", "v6e:2x4", {"fsdp": 8}),
    Row("phi4", "v6e:4x4", {"fsdp": 16}),
    Row("moonlight_16b_a3b", "v6e:4x4", {"fsdp": 4, "expert": 4}),
    Row("gpt_oss_20b", "v6e:4x4", {"fsdp": 4, "expert": 4}),
    Row("mixtral_8x7b", "v5p:2x2x4", {"fsdp": 8, "expert": 2}),
    Row("qwen3_next_80b_a3b", "v5p:2x4x4", {"fsdp": 4, "expert": 8}),
    Row("glm4_5_air", "v5p:2x4x4", {"fsdp": 32}),
)
MODELS = [
    *_PODS,
    *_HOSTS,
    *(row._replace(precision="fp16_master") for row in _PODS),
    Row("qwen3_0_6b", "h100:8", {"fsdp": 8}, "fp32"),
]
_SIZES = {"v5p:2x2x4": 16, "v5p:4x4x4": 64, "v5p:4x8x8": 256, "v5p:8x8x8": 512}
SIZES = [Row(_SCALED, name, {"fsdp": chips}) for name, chips in _SIZES.items()]
ROWS = {row.name: row for row in (*MODELS, *SIZES)}


def measure(row: Row) -> dict[str, object]:
    """Compiles one row and returns its results."""
    changed = config(CONFIGS / "qwen3_8b.toml", row.keys())
    topology = open_topology(row.topology)

    from jaxrl.commands.plan.program import compile_step  # after JAX has its platform
    from jaxrl.commands.plan.roofline import roofline
    from jaxrl.commands.plan.text import fits, peak, plan_text

    program = compile_step(changed, topology)
    print(plan_text(changed, topology, program, link_rate=50e9), flush=True)
    found = roofline(program, topology.chip, remat="layer")
    return row._asdict() | {
        "name": row.name,
        "peak": program.memory.peak,
        "run": peak(program),
        "of": topology.chip.memory,
        "fits": fits(program, topology),
        "memory": None if program.rejected else dataclasses.asdict(program.memory),
        "traffic": {k: dataclasses.asdict(v) for k, v in program.traffic.items()},
        "roofline": {"compute": found.compute, "links": found.links},
        "kernel": program.step.kernel,
        "hlo_bytes": program.hlo_bytes,
        "seconds": program.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/plan_table.jsonl"))
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument(
        "--write", type=Path, help="write the tables between the marks in this file"
    )
    args = parser.parse_args()
    if args.list:
        print("\n".join(ROWS))
        return
    args.results.parent.mkdir(parents=True, exist_ok=True)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    done = {row["name"]: row for row in map(json.loads, lines)}
    if args.write:
        write_table(args.write, "compiled plans", tables(done))
        return
    for name, row in ROWS.items():
        if args.only in name and name not in done:
            found = measure(row)
            with args.results.open("a") as file:
                file.write(json.dumps(found) + "\n")


def tables(found: Mapping[str, Any]) -> str:
    """Formats all tables as Markdown, with the names of missing rows; {name: results}."""
    head = f"{_SCALED} in bf16_master on 16 to 512 chips"
    rates = "Chips by their data sheets, TFLOP/s of a precision's products"
    return "\n".join(
        [
            f"#### {rates}\n\n{markdown([_chip(name) for name in CHIPS])}",
            _table("Models on chips", _MODEL_COLUMNS, rows=MODELS, found=found),
            _table(head, _SIZE_COLUMNS, rows=SIZES, found=found),
        ]
    )


# Policies whose products differ, and the platforms that can compute them so.
_PRECISIONS = {
    "bf16_master": "tpu gpu",
    "fp16_master": "tpu gpu",
    "fp32": "tpu gpu",
    "fp32,products=bf16x3": "tpu gpu",
    "fp32,products=tf32": "gpu",
}
_MEMORY_COLUMNS = ("parameters", "optimizer", "temporaries", "peak", "run")
_MODEL_COLUMNS = ("model", "chips", "mesh", "precision", "attention", *_MEMORY_COLUMNS)
_MODEL_COLUMNS += ("sent", "products, s", "links, s")
_SIZE_COLUMNS = ("chips", *_MEMORY_COLUMNS, "all-gather", "all-reduce", "reduce-scatter", "permute")
_SIZE_COLUMNS += ("all", "products, s", "links, s")


def _chip(name: str) -> dict[str, str]:
    chip = CHIPS[name]
    cells = {
        "chip": name,
        "memory, GiB": f"{chip.memory / GIB:g}",
        "TB/s": f"{(chip.memory_rate or 0) / 1e12:g}",
        "links, GB/s": f"{(chip.link_rate or 0) / 1e9:g}",
    }
    platform = "gpu" if "tf32" in chip.units else "tpu"
    for precision, platforms in _PRECISIONS.items():
        found = products(parse(precision), chip) if platform in platforms else None
        cells[precision] = "-" if found is None else f"{found.rate / 1e12:,.4g}"
    return cells


def _table(
    head: str, columns: Sequence[str], *, rows: Sequence[Row], found: Mapping[str, Any]
) -> str:
    there = [_cells(found[row.name]) for row in rows if row.name in found]
    shown = [{column: cells.get(column, "") for column in columns} for cells in there]
    missing = [row.name for row in rows if row.name not in found]
    note = f"\nNot compiled: {', '.join(missing)}.\n" if missing else ""
    return f"#### {head}\n\n{markdown(shown)}{note}"


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Formats results by column; some are missing if the compiler rejected the step."""
    run = f"{row['run'] / GIB:.1f} of {row['of'] / GIB:.1f}"
    cells = {
        "model": row["model"],
        "chips": row["topology"],
        "mesh": ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items()) or "one chip",
        "precision": row["precision"],
        "attention": row["kernel"],
        "peak": f"{row['peak'] / GIB:.1f}",
        "run": run if row["fits"] else f"**{run}**",
    }
    for column, key in (("products, s", "compute"), ("links, s", "links")):
        if (seconds := row["roofline"][key]) is not None:
            cells[column] = f"{seconds:.2f}"
    if memory := row["memory"]:
        temporaries = memory["gradients"] + memory["copies"] + memory["activations"]
        cells["parameters"] = f"{memory['params'] / GIB:.2f}"
        cells["optimizer"] = f"{memory['optimizer'] / GIB:.2f}"
        cells["temporaries"] = f"{temporaries / GIB:.1f}"
        sent = {kind: traffic["sent"] for kind, traffic in row["traffic"].items()}
        for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute"):
            cells[kind.removeprefix("collective-")] = f"{sent.get(kind, 0) / GIB:.0f}"
        cells["sent"] = cells["all"] = f"{sum(sent.values()) / GIB:.0f}"
    return cells


if __name__ == "__main__":
    main()
