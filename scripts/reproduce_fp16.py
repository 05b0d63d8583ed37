"""Reproduces FP16 against BF16: tables and plots of docs/results/precision.md, Result 2.

    python scripts/reproduce_fp16.py runs/fp16
    python scripts/reproduce_fp16.py --quick    two minutes; checks the direction only

Rerun the same command to resume. The offline part needs vLLM (scripts/install_vllm.sh); without it
use --parts sanity. The other parts run only if they are named: families, the sanity test for other
models; served_families, the same with vLLM servers; experts, a mixture of experts with the paper's
algorithms for one; gaps, the deployment gap of every preset; and served, the gap of a vLLM server.
"""

import tempfile
from pathlib import Path

from experiments.runs import plain_parser
from reproduce import experts, families, gaps, grid, offline, phantom, pictures, sanity

PARTS = ["offline", "sanity", *families.PARTS, "experts", "gaps", "served"]


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs/fp16"))
    parser.add_argument("--quick", action="store_true", help="one rollout and its check")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS[:2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory() as directory:
            grid.set_up(Path(directory))
            print("\n".join(sanity.check_direction(Path(directory))))
        return
    directory = arguments.directory.absolute()
    grid.set_up(directory)
    if set(arguments.parts) - {*families.PARTS, "experts"}:
        sanity.write_material(directory)
    if "offline" in arguments.parts:
        compare(directory)
    if "sanity" in arguments.parts:
        for seed in arguments.seeds:
            for cell in sanity.CELLS:
                sanity.run_cell(directory, cell, seed=seed)
    if "gaps" in arguments.parts:
        print(gaps.table(gaps.compared(directory, seed=arguments.seeds[0])))
    if "served" in arguments.parts:
        print(gaps.table(gaps.served(directory, seed=arguments.seeds[0])))
    samplers = [sampler for part, sampler in families.PARTS.items() if part in arguments.parts]
    for seed in arguments.seeds:
        for cell in families.CELLS:
            if cell[1] in samplers:
                families.run_cell(directory / "families", cell, seed=seed)
        for experts_cell in experts.CELLS if "experts" in arguments.parts else ():
            experts.run_cell(directory / "families", experts_cell, seed=seed)
    show(directory)


def compare(directory: Path) -> None:
    """Runs the offline comparison."""
    phantom.write_material(directory / "deep", model=phantom.DEEP, seeds=[0])
    models = {"trained": directory / "base" / "model", "deep": directory / "deep" / "model-0"}
    scores = {}
    for name, path in models.items():
        keys = {"model.path": path, "data.path": directory / "perfectible.jsonl"}
        scores[name] = offline.measured(directory / f"offline-{name}", keys)
    text = "\n".join(f"{name}\n\n{offline.table(found)}" for name, found in scores.items())
    (directory / "offline.md").write_text(text)
    print(text)
    pictures.offline(directory / "fp16_offline.png", scores)


def show(directory: Path) -> None:
    """Writes the table and plot of all finished runs, if there are some."""
    if others := families.found_cells(directory / "families"):
        text = families.table(others)
        (directory / "families.md").write_text(text)
        print(text)
    if mixture := experts.found_cells(directory / "families"):
        text = experts.table(mixture)
        (directory / "experts.md").write_text(text)
        print(text)
    results = sanity.found_cells(directory)
    if not results:
        return
    text = f"{grid.minutes(results):.0f} minutes\n\n{sanity.table(results)}"
    (directory / "sanity.md").write_text(text)
    print(text)
    matched: dict[str, dict] = {}
    for (algorithm, training, served), runs in results.items():
        if training == served:
            matched.setdefault(algorithm, {})[training] = runs
    pictures.sanity(directory / "fp16_sanity.png", matched)


if __name__ == "__main__":
    main()
