"""Tokens per second of the embedded sampler, as JSON lines.

python scripts/bench_sampler.py --shapes S --sequences 8 64 --dtypes f32 bf16 f16 [--baseline DIR]
"""

import argparse
import json
import resource
import statistics
from pathlib import Path

import jax
from benchmarks.sampling import (
    ANSWER,
    PROMPT,
    SHAPES,
    alternate,
    embedded,
    flops_per_token,
    matmul_peak,
    plain_loop,
)


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
        runs = {"jaxrl": embedded(shape, dtype=dtype, sequences=sequences)}
        if args.baseline and sequences == 64 and dtype != "f16":
            runs["baseline"] = plain_loop(args.baseline, shape, dtype=dtype)
        seconds = alternate(runs, repetitions=args.repetitions)
        rates = {k: [sequences * ANSWER / s for s in v] for k, v in seconds.items()}
        flops = max(rates["jaxrl"]) * flops_per_token(shape)
        row = {"shape": shape, "sequences": sequences, "prompt": PROMPT, "answer": ANSWER}
        row |= {
            "sampler": dtype,
            "devices": jax.device_count(),
            "device": jax.devices()[0].device_kind,
        }
        for name, values in rates.items():
            row[f"{name} tokens/s"] = {
                "best": round(max(values)),
                "median": round(statistics.median(values)),
                "worst": round(min(values)),
            }
        row |= {"model GFLOP/s": flops / 1e9, "share of matmul peak": flops / peaks[dtype]}
        if "baseline" in rates:
            ratios = [a / b for a, b in zip(rates["jaxrl"], rates["baseline"], strict=True)]
            row["ratio"] = {"best of each": max(rates["jaxrl"]) / max(rates["baseline"])}
            row["ratio"] |= {"median": statistics.median(ratios), "of rounds": ratios}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        row |= {"process peak MiB, so far": round(peak), "matmul peak GFLOP/s": peaks[dtype] / 1e9}
        line = json.dumps(row)
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
