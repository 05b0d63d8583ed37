"""Measures the samplers' tokens per second, as JSON lines.

python scripts/bench_sampler.py --shapes S --sequences 8 64 --dtypes f32 bf16 f16 [--baseline DIR]
python scripts/bench_sampler.py --sequences 256 --in-flight 64 --lengths lognormal
python scripts/bench_sampler.py --sequences 64 --prompt 768 --window 64 [--every 2]
python scripts/bench_sampler.py --sampler vllm --sequences 8 64 256 --dtypes bf16

The embedded sampler alternates with itself with fixed sums (`sums=fixed`); where completions
wait for others, with requests of `--in-flight` completions, one after another; with `--window`,
with a model that has no window; and with `--beside-vllm`, with a vLLM server. For vLLM alone,
jaxrl's client alternates with a bare loop that discards the completions.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks import plain, sampling, serving
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import Run, alternate, compared, matmul_peak, options, write

from jaxrl.core import Precision


@contextmanager
def embedded(
    shape: str, args: argparse.Namespace, *, dtype: str, limits: np.ndarray
) -> Iterator[dict[str, Run]]:
    in_flight, baseline = args.in_flight, args.baseline
    config = sampling.windowed(shape, window=args.window, every=args.every)
    build = partial(
        sampling.embedded,
        dtype=dtype,
        limits=limits,
        in_flight=min(in_flight, len(limits)),
        prompt=args.prompt,
    )
    runs = {"jaxrl": build(config)}
    if args.window is not None:
        runs["no window"] = build(SHAPES[shape])
    elif in_flight < len(limits):
        runs["one batch after another"] = build(config, together=False)
    else:
        runs["fixed sums"] = build(config, sums="fixed")
    usual = args.prompt == PROMPT and args.window is None and (limits == ANSWER).all()
    if baseline and usual and len(limits) == 64 and dtype in plain.FLAGS:
        runs["hand-written JAX"] = plain.loop(baseline, shape, dtype=dtype)
    with ExitStack() as servers:
        if args.beside_vllm:
            served = Precision.parse(f"fp32,sampler={dtype}").sampler
            drawn = serving.drawn(SHAPES[shape], dtype=served, limits=limits, in_flight=in_flight)
            runs["vLLM"] = servers.enter_context(drawn)
        yield runs


def main() -> None:
    parser = options(__doc__, repetitions=5)
    parser.add_argument("--sampler", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["S"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[8, 64], help="multiples of 8")
    parser.add_argument("--in-flight", type=int, default=1024, help="most decoded at once")
    parser.add_argument("--lengths", choices=sampling.LENGTHS, default="equal")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens, at most 832")
    parser.add_argument("--window", type=int, help="in tokens")
    parser.add_argument("--every", type=int, default=1, help="2: on every other layer, and so on")
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16", "f16"])
    parser.add_argument("--baseline", type=Path, help="directory with a plain jax_decode.py")
    parser.add_argument(
        "--processor-time", action="store_true", help="count seconds of cores, if others use them"
    )
    parser.add_argument("--beside-vllm", action="store_true", help="time it on vLLM, too")
    args = parser.parse_args()
    usual = (args.prompt, args.window) == (PROMPT, None)
    if args.sampler == "vllm" and not (usual and args.lengths == "equal"):
        parser.error("--lengths, --prompt and --window are of the embedded sampler; leave them out")
    if args.beside_vllm and not usual:
        parser.error("--beside-vllm is for the usual prompts without windows")
    peaks = {dtype: matmul_peak(dtype) for dtype in args.dtypes}
    for shape, sequences, dtype in itertools.product(args.shapes, args.sequences, args.dtypes):
        limits = sampling.LENGTHS[args.lengths](sequences)
        if args.sampler == "embedded":
            made = embedded(shape, args, dtype=dtype, limits=limits)
        else:
            served = Precision.parse(f"fp32,sampler={dtype}").sampler
            made = serving.clients(SHAPES[shape], dtype=served, sequences=sequences)
        clock = time.process_time if args.processor_time else time.perf_counter
        with made as runs:
            seconds = alternate(runs, repetitions=args.repetitions, clock=clock)
        tokens = int(limits.sum())
        layers = {"window": args.window, "every": args.every}
        config = sampling.windowed(shape, **layers)
        per_token = sampling.flops_per_token(config, prompt=args.prompt)
        flops = tokens * per_token / min(seconds["jaxrl"])
        row = {"shape": shape, "sequences": sequences, "prompt": args.prompt, **layers}
        row |= {"longest": ANSWER, "lengths": args.lengths, "in flight": args.in_flight}
        row |= {"sampler": args.sampler, "dtype": dtype, "model GFLOP/s": flops / 1e9}
        row |= {"matmul peak GFLOP/s": peaks[dtype] / 1e9, "share": flops / peaks[dtype]}
        write(row | compared(seconds, tokens=tokens), args.out)


if __name__ == "__main__":
    main()
