"""Compiles the embedded sampler's decoding for chips and prints the table of docs/scale.md.

python scripts/experiments/decode_table.py     # needs libtpu; h100 needs jax's CUDA plugin

Each row takes up to a minute.
"""

import argparse

from runs import CONFIGS, config

from jaxrl.commands.plan.chips import CHIPS, GIB
from jaxrl.commands.plan.topology import open_topology

# Model, topology, rows, and the mesh's axis over all chips. A row has 4,096 slots.
ROWS = (
    ("qwen3_0_6b", "v5e:1x1", 16, "fsdp"),
    ("qwen3_0_6b", "v5p:1x1x1", 64, "fsdp"),
    ("smollm3_3b", "v6e:1x1", 64, "fsdp"),
    ("qwen3_8b", "v5p:1x1x1", 64, "fsdp"),
    ("qwen3_8b", "v6e:1x1", 16, "fsdp"),
    ("qwen3_8b", "v6e:2x2", 64, "tensor"),
    ("qwen3_8b", "v6e:2x2", 64, "fsdp"),
    ("qwen3_8b", "h100:1", 32, "fsdp"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose topology contains this")
    args = parser.parse_args()
    for model, name, rows, axis in ROWS:
        if args.only not in name:
            continue
        topology = open_topology(name)
        from jaxrl.commands.plan.decoding import plan_decoding  # after JAX has its platform
        from jaxrl.commands.plan.resident import resident_memory
        from jaxrl.commands.plan.step import make_step

        keys = {
            "model.path": CONFIGS / "models" / model,
            "mesh.fsdp": 1,
            f"mesh.{axis}": len(topology.devices),
            "sampling.max_batch": rows,
        }
        step = make_step(config(CONFIGS / "qwen3_8b.toml", keys), topology)
        cache = resident_memory(step).cache
        assert cache is not None
        found = plan_decoding(step, cache)
        rate = CHIPS[name.partition(":")[0]].memory_rate or 0.0
        seconds, moved = found.needed / rate, found.moved
        cells = [model, name, axis if len(topology.devices) > 1 else "one chip"]
        cells += [f"{found.rows} x {found.slots:,}"]
        cells += [f"{size / GIB:.2f}" for size in (found.weights, found.cache)]
        cells += [f"{seconds * 1e3:.1f}", f"{found.rows / seconds:,.0f}"]
        if moved is None:
            cells += ["rejected", ""]
        else:
            cells += [f"{sum(moved) / GIB:.2f}", f"{sum(moved) / found.needed:.2f}"]
        cells += [f"{(found.temporary or 0) / GIB:.2f}", f"{found.sent / GIB:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
