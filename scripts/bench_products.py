"""Times the products of a learner's step alone, by XLA and by torch, beside the whole step.

python scripts/bench_products.py    # a minute; needs torch, and nothing else may run
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import torch
from benchmarks import learning
from benchmarks.learning import LENGTH, SEQUENCES, SINGLE
from benchmarks.shapes import ANSWER, SHAPES
from benchmarks.timing import Run, alternate, processor
from experiments.runs import plain_parser
from jax import lax

from jaxrl.core.precision import parse
from jaxrl.models.logprobs import position_chunks

ROWS = 4  # sequences of a microbatch
CALLS = 20  # of each product, to time it


class Product(NamedTuple):
    """Shapes of the operands, and `lax.dot_general`'s dimension numbers."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    dimensions: tuple

    @property
    def letters(self) -> str:
        """The product as an einsum."""
        (left, right), (batch_left, batch_right) = self.dimensions
        names = [chr(97 + i) for i in range(len(self.left))]
        others = [chr(110 + i) for i in range(len(self.right))]
        for i, j in zip((*left, *batch_left), (*right, *batch_right), strict=True):
            others[j] = names[i]
        batch = [names[i] for i in batch_left]
        free = [n for i, n in enumerate(names) if i not in (*left, *batch_left)]
        free += [n for j, n in enumerate(others) if j not in (*right, *batch_right)]
        return f"{''.join(names)},{''.join(others)}->{''.join(batch + free)}"

    @property
    def flops(self) -> int:
        """Of one such product."""
        (_, right), (_, batch) = self.dimensions
        free = [n for j, n in enumerate(self.right) if j not in (*right, *batch)]
        return 2 * math.prod((*self.left, *free))


def products(jaxpr, *, loops: Sequence[int], times: int = 1) -> Iterator[tuple[Product, int]]:
    """Yields the products of a program, with how often each is computed; `loops` are the rounds of
    its loops of unknown length, from the outermost to the innermost."""
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name == "dot_general":
            left, right = (variable.aval.shape for variable in equation.invars)
            yield Product(left, right, params["dimension_numbers"]), times
        often, inner = times, loops
        if equation.primitive.name == "scan":
            often *= params["length"]
        elif equation.primitive.name == "while":
            often, inner = times * loops[0], loops[1:]
        for value in params.values():
            for one in value if isinstance(value, tuple | list) else [value]:
                found = getattr(one, "jaxpr", one)
                if hasattr(found, "eqns"):
                    yield from products(found, loops=inner, times=often)


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    built = learning.learner_step(
        SHAPES["S"], precision=parse("fp32"), remat="matmuls", work=SINGLE, microbatch=ROWS * LENGTH
    )
    scored = position_chunks(LENGTH) * ANSWER // LENGTH  # chunks of tokens that have log-probs
    found: Counter[Product] = Counter()
    for product, times in products(built.jaxpr, loops=(SEQUENCES // ROWS, scored)):
        found[product] += times
    programs = {product: (by_xla(product), by_torch(product)) for product in found}

    by = [[(found[p], programs[p][i]) for p in found] for i in range(2)]
    runs = {"step": built.run, "products by XLA": run_of(by[0]), "products by torch": run_of(by[1])}
    print(processor())
    for name, seconds in alternate(runs, repetitions=args.repetitions).items():
        print(f"{name}: {', '.join(f'{s:.2f}' for s in seconds)} s")
    print("GFLOP of a step, GFLOP/s by XLA and by torch, shapes:")
    for product, times in sorted(found.items(), key=lambda item: -item[0].flops * item[1]):
        pair = {i: run_of([(CALLS, program)]) for i, program in enumerate(programs[product])}
        fastest = map(min, alternate(pair, repetitions=args.repetitions).values())
        rates = [CALLS * product.flops / s / 1e9 for s in fastest]
        shapes = f"{product.left} {product.right}"
        print(f"{times * product.flops / 1e9:6.1f} {rates[0]:5.0f} {rates[1]:5.0f}  {shapes}")


def run_of(calls: Sequence[tuple[int, Callable[[], object]]]) -> Run:
    """Builds a run that calls each program as often as said and keeps no result."""

    def run(_: int) -> None:
        for times, program in calls:
            for _ in range(times):
                program()

    return run


def by_xla(product: Product) -> Callable[[], object]:
    """Builds a function that computes a product once."""
    compute = jax.jit(partial(lax.dot_general, dimension_numbers=product.dimensions))
    left, right = operands(product)
    compute = compute.lower(left, right).compile()
    left, right = jax.device_put((left, right))
    return lambda: compute(left, right).block_until_ready()


def by_torch(product: Product) -> Callable[[], object]:
    """Builds a function that computes a product once."""
    left, right = map(torch.from_numpy, operands(product))
    return lambda: torch.einsum(product.letters, left, right)


def operands(product: Product) -> tuple[np.ndarray, np.ndarray]:
    """Draws the operands of a product, in f32."""
    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=size) for size in (product.left, product.right))
    return left.astype(np.float32), right.astype(np.float32)


if __name__ == "__main__":
    main()
