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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands.plan.chips import CHIPS, GIB, products
from jaxrl.commands.plan.topology import open_topology
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core.precision import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run of configs/qwen3_8b.toml with changes."""

    model: str  # a directory under configs/models
    topology: str  # see `jaxrl plan`
    mesh: Mapping[str, int]  # axis -> size
    precision: str = "bf16_master"  # dtype policy

    @property
    def name(self) -> str:
        """Name of the row in the results."""
        return f"{self.model} {self.topology} {self.precision}"

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yields the changed keys: two microbatches of one row on every shard."""
        for axis, size in ({"fsdp": 1} | dict(self.mesh)).items():
            yield f"mesh.{axis}", str(size)
        yield "model.path", f"configs/models/{self.model}"
        yield "precision", self.precision
        shards = math.prod(size for axis, size in self.mesh.items() if axis != "tensor")
        group = min(8, 2 * shards)
        yield "train.group_size", str(group)
        yield "train.train_batch", str(2 * shards // group)


_SCALED, _OTHER_SIZES = "qwen3_8b", (("v5p:2x2x4", 16), ("v5p:4x8x8", 256), ("v5p:8x8x8", 512))
_PODS = (
    ("qwen3_0_6b", "v5e:2x4", {"fsdp": 8}),
    (_SCALED, "v5p:4x4x4", {"fsdp": 64}),
    ("qwen3_14b", "v5p:4x4x4", {"fsdp": 64}),
    ("qwen3_30b_a3b", "v5p:4x4x4", {"fsdp": 8, "expert": 8}),
    ("llama3_70b", "v5p:4x4x8", {"fsdp": 64, "tensor": 2}),
)
_HOSTS = (
    ("qwen3_0_6b", "v6e:2x4", {"fsdp": 8}),
    (_SCALED, "v6e:2x4", {"fsdp": 8}),
    (_SCALED, "tpu7x:2x2x1", {"fsdp": 8}),
    ("qwen3_30b_a3b", "tpu7x:2x2x1", {"fsdp": 8}),
    ("qwen3_0_6b", "h100:1", {}),
    ("qwen3_0_6b", "h100:8", {"fsdp": 8}),
    (_SCALED, "h100:1", {}),
    (_SCALED, "a100:8", {"fsdp": 8}),
    (_SCALED, "h100:8", {"fsdp": 8}),
    (_SCALED, "h200:8", {"fsdp": 8}),
    (_SCALED, "b200:8", {"fsdp": 8}),
    ("qwen3_30b_a3b", "b200:8", {"fsdp": 8}),
    ("gemma3_1b", "v5e:2x2", {"fsdp": 4}),
    ("olmo3_7b", "v6e:2x4", {"fsdp": 8}),
    ("smollm3_3b", "v6e:2x2", {"fsdp": 4}),
    ("qwen3_5_9b", "v6e:2x4", {"fsdp": 8}),
    ("phi4", "v6e:4x4", {"fsdp": 16}),
    ("moonlight_16b_a3b", "v6e:4x4", {"fsdp": 4, "expert": 4}),
    ("gpt_oss_20b", "v6e:4x4", {"fsdp": 4, "expert": 4}),
    ("mixtral_8x7b", "v5p:2x2x4", {"fsdp": 8, "expert": 2}),
    ("qwen3_next_80b_a3b", "v5p:2x4x4", {"fsdp": 4, "expert": 8}),
    ("glm4_5_air", "v5p:2x4x4", {"fsdp": 32}),
)
_EXACT_F32 = (("qwen3_0_6b", "h100:8", {"fsdp": 8}),)


def _rows(precision: str, models: Sequence[tuple[str, str, Mapping[str, int]]]) -> list[Row]:
    return [
        Row(model=model, topology=topology, mesh=mesh, precision=precision)
        for model, topology, mesh in models
    ]


MODELS = [
    *_rows("bf16_master", _PODS),
    *_rows("bf16_master", _HOSTS),
    *_rows("fp16_master", _PODS),
    *_rows("fp32", _EXACT_F32),
]
SIZES = _rows("bf16_master", [(_SCALED, name, {"fsdp": chips}) for name, chips in _OTHER_SIZES])


def measure(row: Row) -> dict[str, object]:
    """Compiles one row and returns its results."""
    config = toml_file.load(Config, file="configs/qwen3_8b.toml", overrides=list(row.keys()))
    topology = open_topology(row.topology)

    from jaxrl.commands.plan.program import compile_step  # after JAX has its platform
    from jaxrl.commands.plan.roofline import roofline
    from jaxrl.commands.plan.text import fits, peak, plan_text

    program = compile_step(config, topology)
    print(plan_text(config, topology, program, link_rate=50e9), flush=True)
    found = roofline(program, topology.chip, remat="layer")
    return dataclasses.asdict(row) | {
        "name": row.name,
        "peak": program.memory.peak,
        "run": peak(program),
        "of": topology.chip.memory,
        "fits": fits(program, topology),
        "memory": None if program.rejected else dataclasses.asdict(program.memory),
        "traffic": {k: dataclasses.asdict(v) for k, v in program.traffic.items()},
        "roofline": {
            "compute": found.compute,
            "links": found.links,
        },
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
        print("\n".join(row.name for row in (*MODELS, *SIZES)))
        return
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
    for row in (*MODELS, *SIZES):
        if args.only in row.name and row.name not in names:
            done.append(measure(row))
            with args.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """Formats all tables as Markdown, with the names of missing rows."""
    found = {row["name"]: row for row in results}
    same = [row for row in MODELS if row.model == _SCALED and row.topology == "v5p:4x4x4"]
    sizes = sorted(
        (*SIZES, *(row for row in same if row.precision == "bf16_master")),
        key=lambda row: math.prod(row.mesh.values()),
    )
    head = f"{_SCALED} in bf16_master on 16 to 512 chips"
    return "\n".join(
        [
            *_chips(),
            *_table("Models on chips", _MODEL_CELLS, rows=MODELS, found=found),
            *_table(head, _SIZE_CELLS, rows=sizes, found=found),
        ]
    )


# Policies whose products differ, and the platforms that can compute them so.
_POLICIES = {
    "bf16_master": "tpu gpu",
    "fp16_master": "tpu gpu",
    "fp32": "tpu gpu",
    "fp32,products=bf16x3": "tpu gpu",
    "fp32,products=tf32": "gpu",
}


def _chips() -> Iterator[str]:
    yield "#### Chips by their data sheets, TFLOP/s of a policy's products\n"
    yield f"| chip | memory, GiB | TB/s | links, GB/s | {' | '.join(_POLICIES)} |"
    yield "|" + " --- |" * (4 + len(_POLICIES))
    for name, chip in CHIPS.items():
        cells = [name, f"{chip.memory / GIB:g}"]
        cells += [f"{(chip.memory_rate or 0) / 1e12:g}", f"{(chip.link_rate or 0) / 1e9:g}"]
        platform = "gpu" if "tf32" in chip.units else "tpu"
        for policy, platforms in _POLICIES.items():
            found = products(parse(policy), chip) if platform in platforms else None
            cells.append("-" if found is None else f"{found.rate / 1e12:,.4g}")
        yield f"| {' | '.join(cells)} |"
    yield ""


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
        if row["memory"] is None:  # rejected by the compiler
            return ""
        return f"{sum(found[kind]['sent'] for kind in kinds or found if kind in found) / GIB:.0f}"

    return cell


def _bound(key: str) -> Any:
    return lambda row: "" if (found := row["roofline"][key]) is None else f"{found:.2f}"


def _mesh(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items()) or "one chip"


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
