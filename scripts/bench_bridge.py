"""Times a publish to a vLLM server by part, as JSON lines.

python scripts/bench_bridge.py --models S 0.5B --params bf16 f32 --wire bf16
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.publishing import MODELS, measure
from benchmarks.timing import write

from jaxrl.core.precision import parse


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["S"])
    parser.add_argument(
        "--params", nargs="+", default=["bf16", "f32"], help="dtype of the learner's weights"
    )
    parser.add_argument("--wire", default="bf16", help="dtype of wire and server")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    args = parser.parse_args()
    for name, params in ((n, p) for n in args.models for p in args.params):
        policy = parse(f"fp32,params={params},wire={args.wire},sampler={args.wire}")
        nbytes, seconds = measure(
            name, params_dtype=policy.params, wire=policy.wire, repetitions=args.repetitions
        )
        parts = ("write", "pause", "load", "resume")
        seconds["end to end"] = [sum(p) for p in zip(*(seconds[k] for k in parts), strict=True)]
        served = [sum(p) for p in zip(*(seconds[k] for k in parts[1:]), strict=True)]
        reload = seconds["vLLM reload"]
        row = {"model": name, "params": params, "wire": args.wire, "MB": nbytes / 1e6}
        row |= {
            part: {"median": statistics.median(values), "best": min(values), "worst": max(values)}
            for part, values in seconds.items()
        }
        row["write over copy, best of each"] = min(seconds["copy"]) / min(seconds["write"])
        row["server over reload, rounds"] = [a / b for a, b in zip(served, reload, strict=True)]
        row["server over reload, best of each"] = min(served) / min(reload)
        write(row, args.out)


if __name__ == "__main__":
    main()
