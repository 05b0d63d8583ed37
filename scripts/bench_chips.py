"""Compiles a run's step for chips that you do not have; says where its time and bytes go.

python scripts/bench_chips.py configs/qwen3_8b.toml --topology v5p:2x2x2 --mesh.fsdp 8
    [--hlo FILE] [--json] [--KEY VALUE ...]

Takes the keys and needs the compilers of `jaxrl plan`. A TPU's step takes two minutes to compile.
"""

import argparse
import json
import sys
from pathlib import Path

from jaxrl.commands import options
from jaxrl.commands.plan.chips import CHIPS
from jaxrl.commands.plan.command import PlanConfig, parser
from jaxrl.commands.plan.topology import open_topology


def main() -> None:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--hlo", type=Path, help="keep the compiled program as text")
    flags.add_argument("--json", action="store_true", help="print the sums alone")
    kept, rest = flags.parse_known_args()
    config, given = options.parse_arguments(parser(), PlanConfig, rest)
    if given.topology is None or given.topology.partition(":")[0] not in CHIPS:
        sys.exit("--topology: expected chips such as v5p:2x2x2 or h100:1")
    topology = open_topology(given.topology)

    from benchmarks import chips  # after JAX has its platform

    from jaxrl.commands.plan.roofline import forward_flops
    from jaxrl.commands.plan.step import make_step
    from jaxrl.core import jit
    from jaxrl.sharding import collectives

    step = make_step(config, topology)
    config, sizes, layout = step.config, step.model.config, step.layout
    function = jit(
        step.learner.step,
        sums=config.precision.sums,
        device=layout.mesh.devices.flat[0],
        donate_argnums=0,
        out_shardings=(step.state_shardings, None),
    )
    compiled = topology.compile(function.lower(step.state, step.minibatch))
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    if kept.hlo:
        kept.hlo.write_text(text, encoding="utf-8")
    rows, loops = step.minibatch.batch.tokens.shape[0], step.trips
    of_heads = (
        sizes.num_heads // layout.count("q_heads"),
        sizes.num_kv_heads // layout.count("kv_heads"),
    )
    chip = given.topology.partition(":")[0]

    found = chips.by_cause(text, chip=chip, trips=loops, heads=of_heads, head_dim=sizes.head_dim)
    total = sum(found.values(), chips.Cost())
    if kept.json:
        traffic = collectives(text, trips=loops)
        figures = {
            "milliseconds": total.seconds * 1e3,
            "moved_mib": total.moved / 2**20,
            "sent_mib": sum(one.sent for one in traffic.values()) / 2**20,
            "temporaries_mib": memory.temp_size_in_bytes / 2**20,
        }
        print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}))
        return
    for line in chips.report(found, text, trips=loops):
        print(line)
    flops = 3 * forward_flops(sizes, step.model.specs, rows=rows, length=config.row_length)
    peak = topology.chip.units["bf16"] * len(topology.devices)
    print(f"of peak                             {flops / peak / total.seconds:8.1%}")
    print(f"temporaries                         {memory.temp_size_in_bytes / 2**30:8.2f} GiB")


if __name__ == "__main__":
    main()
