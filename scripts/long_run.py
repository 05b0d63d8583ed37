"""Trains for ten thousand steps with and without a KL term, to see whether the gradient norm grows.

    ./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
    python scripts/long_run.py runs/long [--kl 0.0 0.001] [--picture docs/pictures/long_run.png]

Called again, the script goes on where it was ended.
"""

import argparse
from pathlib import Path

from benchmarks import steadiness


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--kl", nargs="+", default=["0.0", "0.001"])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--picture", type=Path, default=Path("runs/long/long_run.png"))
    options = parser.parse_args()
    courses = [
        steadiness.train(
            kl,
            steps=options.steps,
            base=options.base,
            out=options.directory,
            stretch=max(1, options.steps // 100),
        )
        for kl in options.kl
    ]
    steadiness.draw(courses, options.picture)
    print(steadiness.table(courses))


if __name__ == "__main__":
    main()
