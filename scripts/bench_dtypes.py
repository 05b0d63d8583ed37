"""Measures sampling by dtype: tokens per second and their ratio to f32, as JSON lines.

python scripts/bench_dtypes.py [--vllm] [--shape S] [--sequences 16] [--repetitions 3]

The embedded sampler runs in f32, bf16 and f16, alternately. With --vllm so do vLLM servers in the
same dtypes, with the head's product in f32, and one in bf16 with the head in bf16.
"""

from contextlib import ExitStack

from benchmarks import sampling, serving
from benchmarks.shapes import SHAPES
from benchmarks.timing import alternate, compared, options, write

from jaxrl.core import Precision

DTYPES = ("f32", "bf16", "f16")


def main() -> None:
    parser = options(__doc__, repetitions=3)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--sequences", type=int, default=16, help="a multiple of 8")
    parser.add_argument("--vllm", action="store_true", help="servers, not the embedded sampler")
    args = parser.parse_args()
    config, limits = SHAPES[args.shape], sampling.LENGTHS["equal"](args.sequences)
    with ExitStack() as servers:
        if args.vllm:
            heads = [(dtype, "f32") for dtype in DTYPES] + [("bf16", "bf16")]
            roles = {
                name: Precision.parse(f"fp32,sampler={name[0]},logits={name[1]}") for name in heads
            }
            runs = {
                f"{dtype}, head {head}": servers.enter_context(
                    serving.drawn(
                        config,
                        dtype=roles[dtype, head].sampler,
                        logits=roles[dtype, head].logits,
                        limits=limits,
                        in_flight=args.sequences,
                    )
                )
                for dtype, head in heads
            }
        else:
            runs = {
                dtype: sampling.embedded(
                    config, dtype=dtype, limits=limits, in_flight=args.sequences
                )
                for dtype in DTYPES
            }
        seconds = alternate(runs, repetitions=args.repetitions)
    row = {"shape": args.shape, "sequences": args.sequences, "vllm": args.vllm}
    first = next(iter(runs))  # in f32
    write(row | compared(seconds, tokens=int(limits.sum()), ours=first), args.out)


if __name__ == "__main__":
    main()
