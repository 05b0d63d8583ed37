"""Compiles the rows of docs/scale.md, one after the other, and writes the tables.

python scripts/plan_table.py --only qwen3_8b       # rows with this in their name, or all of them
python scripts/plan_table.py --write docs/scale.md  # what has been compiled, as tables

Needs libtpu, no TPU, and some minutes a row. Rows that are in the results are not compiled again.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.plan_rows import ROWS, Row, tables

from jaxrl.commands.plan.topology import open_topology
from jaxrl.config import toml_file
from jaxrl.config.training import Config


def measure(row: Row) -> dict[str, object]:
    """Compiles one row."""
    config = toml_file.load(Config, file="configs/qwen3_8b.toml", overrides=list(row.keys()))
    topology = open_topology(row.topology)

    from jaxrl.commands.plan.program import compile_step  # jax must know its platform first
    from jaxrl.commands.plan.roofline import roofline
    from jaxrl.commands.plan.text import fits, peak, report

    program = compile_step(config, topology)
    print(report(config, topology, program, link_rate=50e9), flush=True)
    return dataclasses.asdict(row) | {
        "name": row.name,
        "peak": program.memory.peak,
        "run": peak(program),
        "of": topology.chip.memory,
        "fits": fits(program, topology),
        "memory": None if program.refused else dataclasses.asdict(program.memory),
        "traffic": {k: dataclasses.asdict(v) for k, v in program.traffic.items()},
        "roofline": dataclasses.asdict(roofline(program, topology.chip, remat="layer")),
        "kernel": program.kernel,
        "hlo_bytes": program.hlo_bytes,
        "seconds": program.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/plan_table.jsonl"))
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this file")
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


if __name__ == "__main__":
    main()
