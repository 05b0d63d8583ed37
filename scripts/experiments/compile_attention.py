"""Compiles the attention part of one layer for a TPU, forward and backward; says where time goes.

python scripts/experiments/compile_attention.py v6e:2x4 --heads 32 8

Needs libtpu and no TPU; a minute. The part begins and ends with the arrays of projections: norm,
rope, the order of heads and attention, for two rows of 4,096 tokens in bf16 with heads of 128.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.commands.plan.topology import open_topology
from jaxrl.core.precision import parse
from jaxrl.models import heads
from jaxrl.models.attention.kernels import by_kernel
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.rope import RopeTable
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS

sys.path.append(str(Path(__file__).parents[1]))
ROWS, LENGTH, SIZE = 2, 4096, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("topology", help="as of `jaxrl plan`")
    parser.add_argument("--heads", type=int, nargs=2, required=True, help="of queries, of keys")
    given = parser.parse_args()
    topology = open_topology(given.topology)

    from benchmarks import chips  # after JAX has its platform

    layout = Layout(make_mesh(fsdp=1, devices=topology.devices[:1]), PRESETS["all"])
    whole, precision = layout.batch(()), parse("bf16_master")
    attend = by_kernel("splash", layout=layout)
    plain = heads.Settings(SIZE, 1e-6, precision)
    scaled = plain._replace(factor=SIZE**-0.5)

    def forward(inputs, table, segments):
        q, k, v, of_q, of_k = inputs
        q = heads.arrange(q, table, of_q, plain)
        k = heads.arrange(k, table, of_k, scaled)
        v = heads.arrange(v, None, None, plain)
        out = attend(q, k, v, segments, scoring=Scoring(None, 1.0), precision=precision)
        return heads.join(out, plain)

    def both(inputs, table, segments, dout):
        out, backward = jax.vjp(lambda x: forward(x, table, segments), inputs)
        return out, backward(dout)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    queries, keys = (array(ROWS, LENGTH, n * SIZE) for n in given.heads)
    weight, angles = (array(*x, dtype=jnp.float32) for x in ((SIZE,), (ROWS, LENGTH, 1, SIZE // 2)))
    inputs = (queries, keys, keys, weight, weight)
    segments = array(ROWS, LENGTH, dtype=jnp.int32)
    lowered = jax.jit(both).lower(inputs, RopeTable(angles, angles), segments, queries)
    text = topology.compile(lowered).as_text() or ""
    chip = given.topology.partition(":")[0]
    found = chips.by_cause(text, chip=chip, trips=(), heads=tuple(given.heads), head_dim=SIZE)
    for cause, cost in found.items():
        print(f"{cause:36}{cost.seconds * 1e3:8.3f} ms {cost.moved / 2**30:8.2f} GiB moved")
    total = sum(found.values(), chips.Cost())
    print(f"{'total':36}{total.seconds * 1e3:8.3f} ms {total.moved / 2**30:8.2f} GiB moved")


if __name__ == "__main__":
    main()
