"""Measures whole iterations (sample, reward, learn, publish), as JSON lines: ours and our peers'.

scripts/install_peers.sh    # TRL and Tunix, in environments of their own
python scripts/bench_iteration.py --peers .venv-peers

All programs have the same model, prompts, lengths and learning rate, and take turns. Peers compute
in f32.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

from benchmarks import peers
from benchmarks.iteration.pace import ANSWER, GROUP, PROMPT, PROMPTS
from benchmarks.timing import alternate, compared, options, write
from experiments.runs import exit_on_sigterm

TOKENS = PROMPTS * GROUP * (PROMPT + ANSWER)
SHAPE, ROWS, PEER_ROWS = "S", 4, 16  # sequences per microbatch


def main() -> None:
    parser = options(__doc__, repetitions=3)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16_master"])
    parser.add_argument("--peers", type=Path, help="directory of scripts/install_peers.sh")
    args = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as programs:
        material = peers.write_material(Path(made), SHAPE)
        commands = {
            f"jaxrl {precision}": [sys.executable, "run_jaxrl.py", *material, ROWS, precision]
            for precision in args.precisions
        }
        for name, program in (peers.installed(args.peers) if args.peers else {}).items():
            commands[name] = [*program, *material, PEER_ROWS]
        runs = {
            name: programs.enter_context(peers.started(*command))
            for name, command in commands.items()
        }
        seconds = alternate(runs, repetitions=args.repetitions)
    row = {"shape": SHAPE, "prompts": PROMPTS, "group": GROUP}
    row |= {"prompt": PROMPT, "completion": ANSWER}
    ours = f"jaxrl {args.precisions[0]}"
    write(row | compared(seconds, tokens=TOKENS, ours=ours), args.out)


if __name__ == "__main__":
    main()
