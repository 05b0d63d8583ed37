"""Trains the quickstart with several seeds and counts the alarms of runs that go well.

./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
python scripts/false_alarms.py [--seeds 0 1 2] [--windows 10 20] [--steps 60]

Each run is kept under --out; called again, the script goes on where it was ended.
"""

import argparse
from pathlib import Path

import jax
from benchmarks.quickstart import material

from jaxrl.config import toml_file
from jaxrl.config.alarms import Limits
from jaxrl.config.training import Config
from jaxrl.monitoring.alarms.rules import replay_alarms
from jaxrl.monitoring.tracking.tracking import read_metrics
from jaxrl.train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--windows", nargs="+", type=int, default=[10, 20])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/false_alarms"))
    options = parser.parse_args()
    # The programs are the same in all runs: compile them once.
    jax.config.update("jax_compilation_cache_dir", str(options.out / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    for seed in options.seeds:
        run_dir = options.out / str(seed)
        overrides = {
            "seed": seed,
            "run_dir": run_dir,
            "train.steps": options.steps,
            **material(options.base),
        }
        asked = [(key, str(value)) for key, value in overrides.items()]
        result = train(toml_file.load(Config, file="configs/quickstart.toml", overrides=asked))
        if result.signum is not None:
            return
        entries = read_metrics(run_dir / "metrics.jsonl")
        for window in options.windows:
            found = replay_alarms(entries, Limits(warmup=window, window=window))
            said = "; ".join(f"step {a.step} {a.name}: {a.text}" for a in found)
            print(
                f"seed {seed}: {result.initial_accuracy:.3f} -> {result.final_accuracy:.3f}, "
                f"window {window}: {len(found)} alarms {said}",
                flush=True,
            )


if __name__ == "__main__":
    main()
