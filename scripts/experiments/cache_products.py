"""Times attention over the KV cache in a decode step, in several forms, against the memory.

python scripts/experiments/cache_products.py    # half a minute, with nothing else running

The cache of shape S in f32: 256 rows of 192 slots in 6 layers, cut over two CPU devices, one a
core, as the embedded sampler does. Each line: ms for all layers, and GB/s of cache read.
"""

import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from runs import plain_parser

LAYERS, ROWS, KV_HEADS, QUERIES, SLOTS, SIZE = 6, 256, 4, 2, 192, 32
SCORES, SUM = "bkgd,bkds->bkgs", "bkgs,bksd->bkgd"  # keys are stored transposed
# Each with the operand in front of the cache's.
FORMS = {
    "scores of keys": ("bkgd", SCORES),
    "weighted sum of values": ("bkgs", SUM),
    "the same, values transposed": ("bkgs", "bkgs,bkds->bkgd"),
    "the same, result transposed": ("bkgs", "bkgs,bksd->bkdg"),
}
SIZES = {"b": ROWS, "k": KV_HEADS, "g": QUERIES, "d": SIZE, "s": SLOTS}


def main() -> None:
    plain_parser(__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.make_mesh((2,), ("rows",))
    read = LAYERS * ROWS * KV_HEADS * SLOTS * SIZE * 4 / 1e9  # GB of keys, or of values
    print(f"memory, two threads: {memory_rate():.1f} GB/s")
    for name, (front, product) in FORMS.items():
        cache = product.partition(",")[2].partition("->")[0]
        shape = (LAYERS, *(SIZES[letter] for letter in cache))
        arrays = (
            put(mesh, tuple(SIZES[letter] for letter in front), rows=0),
            put(mesh, shape, rows=1),
        )

        def all_layers(x, layers, product=product):
            def layer(total, one):
                return total + jnp.sum(jnp.einsum(product, x, one)), None

            return jax.lax.scan(layer, 0.0, layers)[0]

        program = jax.jit(all_layers).lower(*arrays).compile()
        seconds = best(lambda p=program, a=arrays: jax.block_until_ready(p(*a)))
        print(f"{name}: {1e3 * seconds:.1f} ms, {read / seconds:.1f} GB/s")


def put(mesh: jax.sharding.Mesh, shape: tuple[int, ...], *, rows: int) -> jax.Array:
    """Returns random numbers, cut along the dimension of the rows."""
    cut = PartitionSpec(*[None] * rows, "rows")
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.device_put(values, NamedSharding(mesh, cut))


def memory_rate() -> float:
    """Measures the GB/s at which two threads read memory."""
    arrays = [np.ones(10**8, np.float32) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return 0.8 / best(lambda: list(pool.map(np.sum, arrays)))


def best(run: Callable[[], object]) -> float:
    """Returns the shortest of eight runs, in seconds."""
    return min(timeit.repeat(run, number=1, repeat=8))


if __name__ == "__main__":
    main()
