"""Measures speed and memory of the learner's step, as JSON lines.

python scripts/bench_learner.py --shapes S M --dtypes f32 bf16 f16 [--elided] [--kl 0.001]
    [--torch DIR] [--peers DIR]

The dtypes of a shape and the baselines are timed alternately.
"""

import functools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import learning, peers, plain
from benchmarks.learning import LENGTH, SEQUENCES, SINGLE
from benchmarks.shapes import SHAPES
from benchmarks.timing import Run, alternate, compared, matmul_peak, options, write
from experiments.runs import exit_on_sigterm

from jaxrl.core import Precision

PRECISION = {"f32": "fp32", "bf16": "bf16_master", "f16": "fp16_master"}
PEER_ROWS = 16  # sequences per microbatch of torch and TRL


@contextmanager
def trl_step(directory: Path, shape: str) -> Iterator[tuple[str, Run]]:
    """Starts TRL's trainer; yields its name with a function that takes a step in f32."""
    found = peers.installed(directory)
    name = next((name for name in found if name.startswith("TRL")), None)
    if name is None:
        raise SystemExit(f"--peers {directory}: TRL is missing; run scripts/install_peers.sh")
    with tempfile.TemporaryDirectory() as made:
        material = peers.write_material(Path(made), shape)
        with peers.started(*found[name], *material, PEER_ROWS, "step") as run:
            yield f"{name} f32", run


def main() -> None:
    parser = options(__doc__, repetitions=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["S"])
    parser.add_argument("--dtypes", nargs="+", choices=PRECISION, default=list(PRECISION))
    parser.add_argument("--rows", type=int, default=4, help="sequences per microbatch")
    parser.add_argument("--remat", default="matmuls")
    parser.add_argument("--elided", action="store_true", help="time it without roundings, too")
    parser.add_argument("--kl", type=float, help="time it with this KL coefficient, too")
    parser.add_argument("--torch", type=Path, help="directory with a plain torch_step.py")
    parser.add_argument("--peers", type=Path, help="time TRL of scripts/install_peers.sh in f32")
    args = parser.parse_args()
    exit_on_sigterm()
    peaks = {dtype: matmul_peak(dtype) for dtype in args.dtypes}
    for shape in args.shapes:
        build = functools.partial(
            learning.learner_step,
            SHAPES[shape],
            remat=args.remat,
            work=SINGLE,
            microbatch=args.rows * LENGTH,
        )
        precisions = {dtype: Precision.parse(PRECISION[dtype]) for dtype in args.dtypes}
        built = {dtype: build(precision=precision) for dtype, precision in precisions.items()}
        runs = {dtype: one.run for dtype, one in built.items()}
        for dtype in args.dtypes:
            if args.elided:
                runs[f"no roundings {dtype}"] = build(precision=precisions[dtype], elide=True).run
            if args.kl:
                runs[f"kl {args.kl:g} {dtype}"] = build(precision=precisions[dtype], kl=args.kl).run
            if args.torch and dtype in plain.FLAGS:
                step = plain.torch_step(args.torch, shape, dtype=dtype, rows=PEER_ROWS)
                runs[f"hand-written torch {dtype}"] = step
        with ExitStack() as programs:
            if args.peers and "f32" in args.dtypes:
                name, run = programs.enter_context(trl_step(args.peers, shape))
                runs[name] = run
            seconds = alternate(runs, repetitions=args.repetitions)
        tokens, flops = SEQUENCES * LENGTH, learning.step_flops(shape)
        for dtype, one in built.items():
            speed = flops / min(seconds[dtype])
            row = {"shape": shape, "sequences": SEQUENCES, "length": LENGTH, "rows": args.rows}
            row |= {"precision": PRECISION[dtype], "remat": args.remat}
            row |= {"model GFLOP/s": speed / 1e9, "matmul peak GFLOP/s": peaks[dtype] / 1e9}
            row |= {"share": speed / peaks[dtype], "step MiB": one.mib}
            beside = {k: v for k, v in seconds.items() if k == "f32" or k.endswith(f" {dtype}")}
            shown = {dtype: seconds[dtype]} | beside
            write(row | compared(shown, tokens=tokens, ours=dtype), args.out)


if __name__ == "__main__":
    main()
