"""Trains every recipe on the quickstart's task and draws the curves.

./scripts/quickstart.sh    # makes the base model and the data, runs/quickstart
python scripts/compare_losses.py [--recipes grpo gspo] [--seeds 0 1 2] [--picture docs/losses.png]

Each run is kept under --out; called again, the script goes on where it was ended.
"""

import argparse
from pathlib import Path

import jax
from benchmarks.recipes import draw, table, train

from jaxrl.losses import recipes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=sorted(recipes.__all__))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("runs/losses"))
    parser.add_argument("--picture", type=Path, default=Path("runs/losses/losses.png"))
    options = parser.parse_args()
    # The sampler's programs are the same in all runs: compile them once.
    jax.config.update("jax_compilation_cache_dir", str(options.out / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    curves = [
        train(recipe, seed=seed, base=options.base, out=options.out)
        for seed in options.seeds
        for recipe in options.recipes
    ]
    draw(curves, options.picture)
    print(table(curves))


if __name__ == "__main__":
    main()
