"""Measures the learner's step with shared prompts against the same step without, as JSON lines.

python scripts/bench_shared_prompts.py --prompt 1024 --completion 128 --group 8 --groups 4

Both compute the same gradient in f32, with shape S; they are timed alternately. Memory is what the
compiled step needs.
"""

from functools import partial

from benchmarks import learning
from benchmarks.learning import Groups
from benchmarks.shapes import SHAPES
from benchmarks.timing import alternate, compared, options, write

from jaxrl.core import PRESETS


def main() -> None:
    parser = options(__doc__, repetitions=5)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--completion", type=int, default=128, help="tokens")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=4096, help="tokens, at most")
    args = parser.parse_args()
    build = partial(
        learning.learner_step,
        SHAPES["S"],
        precision=PRESETS["fp32"],
        remat="matmuls",
        work=Groups(args.groups, args.group, args.prompt, args.completion),
        microbatch=args.microbatch,
    )
    steps = {"plain": build(shared=False), "shared": build(shared=True)}
    runs = {name: one.run for name, one in steps.items()}
    seconds = alternate(runs, repetitions=args.repetitions)
    keys = ("prompt", "completion", "group", "groups")
    row = {"shape": "S"} | {key: getattr(args, key) for key in keys}
    for name, one in steps.items():
        row |= {f"{name} token passes": one.passes, f"{name} step MiB": one.mib}
    row |= {"fewer token passes": steps["plain"].passes / steps["shared"].passes}
    tokens = args.groups * args.group * (args.prompt + args.completion)
    write(row | compared(seconds, tokens=tokens, ours="shared"), args.out)


if __name__ == "__main__":
    main()
