"""Compiles the steps of scripts/benchmarks/chips.json; compares their figures with those in it.

python scripts/check_chips.py [NAME ...] [--write]

Each compiler has figures of its own: estimated time without communication, bytes that one device
moves in its memory and sends, and temporaries. `--write` records those that were found. The exit
status is 1 if one differs by more than 1 %, or if the compiler at hand has none. All steps together
take an hour; a small one takes a minute.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from jaxrl.commands.plan.chips import GPUS

_SCRIPTS = Path(__file__).parent
_FILE = _SCRIPTS / "benchmarks" / "chips.json"
_TOLERANCE = 0.01


def main() -> None:
    steps = json.loads(_FILE.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(steps)}")
    parser.add_argument("--write", action="store_true", help="record the figures")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in steps]:
        parser.error(f"{unknown[0]}: expected one of {', '.join(steps)}")
    differs = False
    for name in given.names or steps:
        topology = steps[name]["arguments"][steps[name]["arguments"].index("--topology") + 1]
        package = "jax-cuda12-pjrt" if topology.partition(":")[0] in GPUS else "libtpu"
        compiler = f"{package} {importlib.metadata.version(package)}"
        found, kept = _figures(steps[name]["arguments"]), steps[name]["figures"].get(compiler)
        for figure, number in found.items():
            before = "none" if kept is None else f"{kept[figure]:g}"
            print(f"{name}, {compiler}: {figure} {number:g}, recorded {before}")
            differs |= kept is None or abs(number - kept[figure]) > _TOLERANCE * abs(kept[figure])
        if given.write:
            steps = json.loads(_FILE.read_text(encoding="utf-8"))  # others may have written
            steps[name]["figures"][compiler] = found
            _FILE.write_text(json.dumps(steps, indent=2) + "\n", encoding="utf-8")
    sys.exit(differs and not given.write)


def _figures(arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, str(_SCRIPTS / "bench_chips.py"), *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
