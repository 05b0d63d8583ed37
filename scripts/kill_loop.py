"""Kills a run with SIGKILL at random moments, resumes it, and compares it with an undisturbed one.

    python scripts/kill_loop.py runs/kills [--kills 100] [--steps 40] [--seed 0]

Needs no model and no server. A run that finishes is compared, and another one begins until the
number of kills is reached. Every file that does not hold times must be the same, bit for bit:
parameters and optimizer state, the exported model, metrics, samples. Exits with status 1 otherwise.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import small_run
from experiments.runs import plain_parser


def main() -> int:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    material, undisturbed = options.directory / "material", options.directory / "undisturbed"
    small_run.write_material(material)
    shutil.rmtree(undisturbed, ignore_errors=True)
    begun = time.monotonic()
    command = small_run.command(material, undisturbed, steps=options.steps)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    longest = time.monotonic() - begun
    chance, killed, finished, status = random.Random(options.seed), Counter[str](), 0, 0
    while (left := options.kills - killed.total()) > 0:
        run_dir = options.directory / f"killed_{finished}"
        shutil.rmtree(run_dir, ignore_errors=True)
        command = small_run.command(material, run_dir, steps=options.steps)
        killed += disturb(command, run_dir, chance=chance, longest=longest, kills=left)
        finished += 1
        different = small_run.differences(run_dir, undisturbed)
        if small_run.kept(run_dir) != small_run.kept(undisturbed):
            different.append(f"checkpoints/ holds {', '.join(small_run.kept(run_dir))}")
        status |= bool(different)
        print(
            f"{killed.total()} kills {dict(killed)}, {finished} runs: {run_dir} is "
            + (f"DIFFERENT: {', '.join(different)}" if different else "the same, bit for bit"),
            flush=True,
        )
    return status


def disturb(
    command: list[str], run_dir: Path, *, chance: random.Random, longest: float, kills: int
) -> Counter[str]:
    """Runs a command to its end, after up to `kills` kills; counts the kills by the activity that
    they interrupted.

    Raises:
      RuntimeError: if the run fails for another reason.
    """
    killed, log = Counter[str](), run_dir.with_suffix(".log")
    while True:
        before = _saved(run_dir)
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            if killed.total() < kills:
                _wait(process, run_dir, before=before, chance=chance, longest=longest)
                if process.poll() is None:
                    killed[_activity(run_dir, before=before)] += 1
                    process.send_signal(signal.SIGKILL)
            if process.wait() == 0:
                return killed
        finally:
            process.kill()
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run ended with status {process.returncode}; see {log}")


def _wait(
    process: subprocess.Popen[bytes],
    run_dir: Path,
    *,
    before: int,
    chance: random.Random,
    longest: float,
) -> None:
    """Waits: one time in four for any moment of a start, else for one after its first step."""
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, longest))
        return
    while process.poll() is None and _saved(run_dir) == before:
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.5))


def _saved(run_dir: Path) -> int:
    """Returns the step of the last checkpoint, 0 without one; every step has one."""
    path = run_dir / "checkpoints"
    names = [p.name for p in path.iterdir()] if path.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def _activity(run_dir: Path, *, before: int) -> str:
    if _saved(run_dir) == before:
        return "starting"
    saving = any(not path.name.isdigit() for path in (run_dir / "checkpoints").iterdir())
    return "saving" if saving else "training"


if __name__ == "__main__":
    sys.exit(main())
