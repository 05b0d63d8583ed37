"""Reproduces phantom clipping: tables and plots of docs/results/precision.md, Result 1.

    python scripts/reproduce_phantom_clipping.py runs/phantom
    python scripts/reproduce_phantom_clipping.py --quick     two minutes; checks the direction only
    python scripts/reproduce_phantom_clipping.py runs/phantom --samplers     shows finished runs
    python scripts/reproduce_phantom_clipping.py runs/phantom --explanations some minutes; seed 0
    python scripts/reproduce_phantom_clipping.py runs/phantom --doses        a quarter hour a seed
    python scripts/reproduce_phantom_clipping.py runs/phantom --sharp        a quarter hour a seed
    python scripts/reproduce_phantom_clipping.py runs/phantom --hill         half an hour

Rerun the same command to resume. vLLM needs scripts/install_vllm.sh.
"""

import tempfile
from pathlib import Path

from experiments.runs import plain_parser
from reproduce import explanations, grid, hill, phantom, pictures, regimes
from reproduce.phantom import SAMPLERS


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs/phantom"))
    parser.add_argument("--quick", action="store_true", help="three short runs and their checks")
    parser.add_argument("--explanations", action="store_true", help="the write-up's other ones")
    parser.add_argument("--doses", action="store_true", help="clips with more phantom clips")
    parser.add_argument("--sharp", action="store_true", help="a model with a larger beta")
    parser.add_argument("--hill", action="store_true", help="both policies of each checkpoint")
    parser.add_argument("--samplers", nargs="*", choices=SAMPLERS, default=[*SAMPLERS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.quick:
        with tempfile.TemporaryDirectory() as directory:
            grid.set_up(Path(directory))
            print("\n".join(phantom.check_directions(Path(directory))))
        return
    directory = arguments.directory.absolute()
    grid.set_up(directory)
    phantom.write_material(directory, model=phantom.DEEP, seeds=arguments.seeds)
    if arguments.explanations:
        seed = arguments.seeds[0]
        print(explanations.table(explanations.compared(directory, seed=seed)))
        return
    if arguments.doses:
        runs = regimes.compared(
            directory / "doses", material=directory, cases=regimes.DOSES, seeds=arguments.seeds
        )
        print(regimes.table("clip", runs))
        return
    if arguments.sharp:
        material = directory / "sharp"
        phantom.write_material(material, model=regimes.SHARP, seeds=arguments.seeds)
        runs = regimes.compared(
            material, material=material, cases=regimes.SHARP_CASES, seeds=arguments.seeds
        )
        print(regimes.table("model", runs))
        return
    if arguments.hill:
        print(
            hill.table(hill.compared(directory, samplers=arguments.samplers, seeds=arguments.seeds))
        )
        return
    for sampler in arguments.samplers:
        phantom.train_rows(directory, sampler=sampler, seeds=arguments.seeds)
    show(directory)


def show(directory: Path) -> None:
    """Writes tables and plots of all finished runs."""
    results = {s: found for s in SAMPLERS if (found := phantom.found_rows(directory, sampler=s))}
    if not results:
        raise SystemExit(f"{directory} has no finished runs; leave out --samplers to train them")
    for sampler, rows in results.items():
        text = f"{sampler}, {grid.minutes(rows):.0f} minutes\n\n{phantom.table(rows)}"
        (directory / f"{sampler}.md").write_text(text)
        print(text)
    pictures.phantom_lengths(directory / "phantom_lengths.png", results, rows=[*phantom.ROWS])
    precisions = {"f32 learner": phantom.FAILURE, **phantom.MATCHED}
    betas = {
        s: {precision: rows[name] for precision, name in precisions.items() if name in rows}
        for s, rows in results.items()
    }
    if any(betas.values()):
        pictures.phantom_betas(directory / "phantom_betas.png", betas)


if __name__ == "__main__":
    main()
