"""Tokens per second of the embedded sampler, as JSON lines.

python scripts/bench_sampler.py --shapes S --sequences 8 64 --dtypes f32 bf16 f16 [--baseline DIR]
"""

import argparse
from pathlib import Path

from benchmarks import plain, sampling
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import alternate, matmul_peak, summary, versus, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["S"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[8, 64], help="multiples of 8")
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16", "f16"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--baseline", type=Path, help="a folder with a plain jax_decode.py")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    peaks = {dtype: matmul_peak(dtype) for dtype in args.dtypes}
    for shape, sequences, dtype in (
        (s, n, d) for s in args.shapes for n in args.sequences for d in args.dtypes
    ):
        runs = {"jaxrl": sampling.embedded(shape, dtype=dtype, sequences=sequences)}
        if args.baseline and sequences == 64 and dtype in plain.FLAGS:
            runs["baseline"] = plain.loop(args.baseline, shape, dtype=dtype)
        seconds = alternate(runs, repetitions=args.repetitions)
        rates = {k: [sequences * ANSWER / s for s in v] for k, v in seconds.items()}
        flops = max(rates["jaxrl"]) * sampling.flops_per_token(shape)
        row = {"shape": shape, "sequences": sequences, "prompt": PROMPT, "answer": ANSWER}
        row |= {"sampler": dtype, "model GFLOP/s": flops / 1e9}
        row |= {"matmul peak GFLOP/s": peaks[dtype] / 1e9, "share": flops / peaks[dtype]}
        row |= {f"{name} tokens/s": summary(values) for name, values in rates.items()}
        if "baseline" in rates:
            row["ratio"] = versus(rates["jaxrl"], rates["baseline"])
        write(row, args.out)


if __name__ == "__main__":
    main()
