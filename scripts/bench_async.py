"""Compares taking turns with overlapping: time, utilisation, staleness, reward per minute.

    ./scripts/quickstart.sh && ./scripts/install_vllm.sh
    python scripts/bench_async.py runs/async [--staleness 0 1 3 5 10] [--seeds 0 1] [--steps 30]
    python scripts/bench_async.py runs/async --balanced    equal work for both sides
    python scripts/bench_async.py --quick    two short runs; checks that overlap raises utilisation

Learner and server are pinned to one core each. Finished runs are not repeated.
"""

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks import overlap

SERVER_CORE, LEARNER_CORE = 1, 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs/async"))
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 3, 5, 10])
    parser.add_argument("--corrections", nargs="+", default=[*overlap.CORRECTIONS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--balanced", action="store_true", help="the learner does not pack completions"
    )
    parser.add_argument("--quick", action="store_true", help="two short runs and a check")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as directory:
            options.directory, options.seeds, options.steps = Path(directory), [0], 8
            options.staleness, options.corrections = [0, 1], ["token TIS"]
            found = run(options)
        busier = found[1].busy_together - found[0].busy_together
        assert busier > 0.1, f"both sides are busy {busier:+.0%} more of the time at staleness 1"
        return
    run(options)


def run(options: argparse.Namespace) -> list[overlap.Measured]:
    """Measures all runs and prints a table."""
    options.directory.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {SERVER_CORE})  # inherited by the server
    with overlap.server(options.base, log=options.directory / "vllm.log") as url:
        os.sched_setaffinity(0, {LEARNER_CORE})  # before JAX starts its threads
        setup = overlap.Setup(options.base, url, options.steps, options.balanced)
        found = [
            overlap.measure(
                options.directory,
                setup,
                staleness=staleness,
                correction=correction,
                seed=seed,
            )
            # Compared runs follow each other, so that disturbances affect them alike.
            for seed in options.seeds
            for correction in options.corrections
            for staleness in options.staleness
        ]
    print(overlap.table(found), end="")
    return found


if __name__ == "__main__":
    main()
