"""Kills learner and servers at random until a run is through, and runs it once more in peace.

    ./scripts/quickstart.sh && ./scripts/install_vllm.sh
    python scripts/soak.py runs/soak [--steps 300] [--between 20 60] [--seed 0]

Ends with an error if a step is missing or
double, or if rollouts made are not those learnt from, dropped and waiting.
"""

import argparse
from pathlib import Path

from benchmarks import soak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--between", type=float, nargs=2, default=(20.0, 60.0), metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    log = options.directory / "vllm.log"
    with soak.servers(options.base, count=options.servers, log=log) as ports:
        for name, between in (("killed", tuple(options.between)), ("in peace", None)):
            found = soak.soak(
                options.directory / name.replace(" ", "-"),
                base=options.base,
                ports=ports,
                steps=options.steps,
                seed=options.seed,
                between=between,
            )
            print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
