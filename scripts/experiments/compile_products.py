"""Compiles a product for TPUs under dtype policies; prints its estimated cycles, bf16_master = 1.

python scripts/experiments/compile_products.py v5p:1x1x1 v6e:1x1 tpu7x:1x1x1

4,096 tokens, 4,096 numbers each, times a matrix of 12,288 x 4,096, as in a feed-forward network of
Qwen3-8B: values come and go in `activations`, the weight in `compute`. Needs libtpu and no TPU.
"""

import argparse

import jax
from jax.sharding import SingleDeviceSharding

from jaxrl.commands.plan.topology import Topology, open_topology
from jaxrl.core import Precision, jit
from jaxrl.models.products import product
from jaxrl.sharding import program_work

POLICIES = (
    "bf16_master",
    "bf16_master,activations=f32",
    "fp16_master",
    "fp32,products=bf16",
    "fp32,products=bf16x3",
    "fp32,products=bf16x6",
    "fp32",
)


def cycles(precision: Precision, topology: Topology) -> float:
    """Adds up the cycles that the compiler expects."""

    def function(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = product(x, weight, contract=(1, 1), precision=precision)
        return y.astype(precision.activations)

    device = topology.devices[0]
    place = SingleDeviceSharding(device)
    arrays = (((4096, 4096), precision.activations), ((12288, 4096), precision.compute))
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in arrays]
    compiled = topology.compile(jit(function, device=device).lower(*given))
    return sum(one.cycles for one in program_work(compiled.as_text() or "", trips=()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("topologies", nargs="+", metavar="TOPOLOGY")
    chips = {name: open_topology(name) for name in parser.parse_args().topologies}
    print("| policy |", " | ".join(chips), "|")
    print("| --- |", " --- |" * len(chips))
    base: dict[str, float] = {}
    for text in POLICIES:
        cells = []
        for name, topology in chips.items():
            found = cycles(Precision.parse(text), topology)
            cells.append(f"{found / base.setdefault(name, found):.2f}")
        print(f"| {text} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
