"""Measures what fixed sums cost the learner's forward pass, as JSON lines.

python scripts/bench_forward.py --shapes S M --dtypes f32 bf16 f16

Log-probs of the same tokens with `sums=any` and with `sums=fixed`, alternately.
"""

import itertools
import time

from benchmarks import learning
from benchmarks.learning import LENGTH, SEQUENCES
from benchmarks.shapes import SHAPES
from benchmarks.timing import alternate, compared, options, write

from jaxrl.core import Precision

PRECISION = {"f32": "fp32", "bf16": "bf16_master", "f16": "fp16_master"}


def main() -> None:
    parser = options(__doc__, repetitions=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["S"])
    parser.add_argument("--dtypes", nargs="+", choices=PRECISION, default=list(PRECISION))
    parser.add_argument("--rows", type=int, default=4, help="sequences per microbatch")
    parser.add_argument(
        "--processor-time", action="store_true", help="count seconds of cores, if others use them"
    )
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    for shape, dtype in itertools.product(args.shapes, args.dtypes):
        runs = {
            sums: learning.forward(
                SHAPES[shape],
                precision=Precision.parse(f"{PRECISION[dtype]},sums={sums}"),
                microbatch=args.rows * LENGTH,
            )
            for sums in ("any", "fixed")
        }
        seconds = alternate(runs, repetitions=args.repetitions, clock=clock)
        row = {"shape": shape, "sequences": SEQUENCES, "length": LENGTH, "rows": args.rows}
        row |= {"precision": PRECISION[dtype]}
        write(row | compared(seconds, tokens=SEQUENCES * LENGTH, ours="any"), args.out)


if __name__ == "__main__":
    main()
