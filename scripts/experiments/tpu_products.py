"""Prints the cycles that a TPU's compiler estimates for a product, by operands and `products`.

PYTHONPATH=.venv-tpu JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 \
    python scripts/experiments/tpu_products.py [--size 1024]

Needs libtpu (scripts/test.sh installs it in .venv-tpu), no TPU.
"""

import argparse
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.core.precision import PRODUCTS, jit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="of the square matrices")
    size = parser.parse_args().size
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    sharding = NamedSharding(Mesh(np.array(chips[:1]), ("x",)), PartitionSpec())
    dtypes = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
    for name, dtype in dtypes.items():
        x = jax.ShapeDtypeStruct((size, size), dtype, sharding=sharding)
        for products in ("default", *(k for k, (_, there) in PRODUCTS.items() if "tpu" in there)):
            algorithm = None if products == "default" else PRODUCTS[products][0]

            def multiply(x, y, algorithm=algorithm):
                return jnp.matmul(x, y, precision=algorithm, preferred_element_type=jnp.float32)

            text = jit(multiply).lower(x, x).compile().as_text() or ""
            cycles = sum(map(int, re.findall(r'estimated_cycles":"(\d+)"', text)))
            print(f"{name} {products}: {cycles:,} cycles")


if __name__ == "__main__":
    main()
