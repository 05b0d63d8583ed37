"""Compiles a run's step for a TPU that you do not have; says where the compiler expects its time.

python scripts/bench_chips.py configs/qwen3_8b.toml --topology v5p:2x2x2 --mesh.fsdp 8
    [--hlo FILE] [--KEY VALUE ...]

Takes the keys of `jaxrl plan` and needs libtpu. A step takes two minutes to compile.
"""

import argparse
import sys
from pathlib import Path

from jaxrl.commands import options
from jaxrl.commands.plan.chips import TPUS
from jaxrl.commands.plan.command import PlanConfig, parser
from jaxrl.commands.plan.topology import open_topology


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--hlo", type=Path, help="keep the compiled program as text")
    kept, rest = own.parse_known_args()
    config, given = options.parse_arguments(parser(), PlanConfig, rest)
    if given.topology is None or given.topology.partition(":")[0] not in TPUS:
        sys.exit("--topology: expected TPUs such as v5p:2x2x2")
    topology = open_topology(given.topology)

    from benchmarks import chips  # after JAX has its platform

    from jaxrl.commands.plan.roofline import forward_flops
    from jaxrl.commands.plan.step import make_step
    from jaxrl.core import jit
    from jaxrl.models import position_chunks
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
    compiled = function.lower(step.state, step.minibatch).compile()
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    if kept.hlo:
        kept.hlo.write_text(text, encoding="utf-8")
    rows = step.minibatch.batch.tokens.shape[0]
    loops = (rows // config.microbatch_rows, position_chunks(config.row_length))
    of_heads = (
        sizes.num_heads // layout.count("q_heads"),
        sizes.num_kv_heads // layout.count("kv_heads"),
    )
    chip = given.topology.partition(":")[0]

    found = chips.by_cause(text, chip=chip, trips=loops, heads=of_heads, head_dim=sizes.head_dim)
    total = sum(found.values(), chips.Cost())
    for cause, cost in {**found, "total": total}.items():
        share = cost.seconds / total.seconds
        print(f"{cause:36}{cost.seconds:8.4f} s {share:5.1%}{cost.moved / 2**30:9.1f} GiB moved")
    flops = 3 * forward_flops(sizes, step.model.specs, rows=rows, length=config.row_length)
    peak = topology.chip.units["bf16"] * len(topology.devices)
    print(f"of peak                             {flops / peak / total.seconds:8.1%}")
    for kind, traffic in collectives(text, trips=loops).items():
        print(f"{kind:36}{traffic.sent / 2**30:8.2f} GiB sent in {traffic.count}")
    print(f"temporaries                         {memory.temp_size_in_bytes / 2**30:8.2f} GiB")


if __name__ == "__main__":
    main()
