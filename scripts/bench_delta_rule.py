"""Measures the gated delta rule of one layer by the order of its sums, as a line of JSON: chunks of
tokens (`any`) and single tokens (`fixed`).

python scripts/bench_delta_rule.py [--tokens 512] [--repetitions 5]

One row, with the heads of Qwen3-Next: 16 of keys, 32 of values, 128 numbers each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.timing import alternate, compared, options, write

from jaxrl import jit
from jaxrl.core import Precision
from jaxrl.models.delta_rule import Gates, delta_rule


def main() -> None:
    parser = options(__doc__, repetitions=5)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    rng, shape = np.random.default_rng(0), (1, args.tokens)
    q, k, v = (jnp.asarray(rng.normal(size=(*shape, n, 128)), "float32") for n in (16, 16, 32))
    decay, beta = (jnp.asarray(rng.uniform(size=(*shape, 32)), "float32") for _ in range(2))
    inputs = (q, k, v, Gates(-0.1 * decay, beta), jnp.ones(shape, jnp.int32))

    def rule(sums: str):
        precision = Precision.parse(f"fp32,sums={sums}")
        run = jit(lambda *x: delta_rule(*x, precision=precision), sums=sums)
        return lambda _: jax.block_until_ready(run(*inputs))

    seconds = alternate({s: rule(s) for s in ("any", "fixed")}, repetitions=args.repetitions)
    write({"tokens": args.tokens} | compared(seconds, tokens=args.tokens, ours="fixed"), args.out)


if __name__ == "__main__":
    main()
