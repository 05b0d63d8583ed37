"""Kills a run with SIGKILL at random moments, resumes it, and compares it with an undisturbed one.

    python scripts/kill_loop.py runs/kills [--kills 100] [--steps 40] [--seed 0] [--adapters]

Needs no model, and vLLM only with --adapters: the run then publishes adapters alone to two servers,
and one kill in four hits a server. A run that finishes is compared, and another one begins until
the number of kills is reached. Every file that does not hold times must be the same, bit for bit:
parameters and optimizer state, the exported model, metrics, samples. Exits with status 1 otherwise.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import small_run
from experiments.runs import exit_on_sigterm, plain_parser
from experiments.served import healthy, kill_server, servers

PATIENCE = 600.0  # seconds for a step, and for the rest of a run after its last kill


def main() -> int:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapters", action="store_true")
    options = parser.parse_args()
    exit_on_sigterm()
    material = options.directory / "material"
    if not options.adapters:
        small_run.write_material(material)
        return loop(options, material, ports=[])
    small_run.write_material(material, head_dim=32)  # vLLM on CPU has no smaller heads
    settings = {"log": options.directory / "vllm.log", "max_model_len": 32, "max_lora_rank": 8}
    with servers(material / "model", **settings) as ports:
        return loop(options, material, ports=ports)


def loop(options: argparse.Namespace, material: Path, *, ports: Sequence[int]) -> int:
    """Disturbs runs until the number of kills is reached; returns the exit status."""
    keys = {}
    if ports:
        keys = {"sampler.name": "vllm", "lora.rank": "4", "lora.publish": "adapters"}
        keys["sampler.url"] = json.dumps([f"http://127.0.0.1:{port}" for port in ports])
        keys["sampler.timeout"] = "60"
    undisturbed = options.directory / "undisturbed"
    shutil.rmtree(undisturbed, ignore_errors=True)
    begun = time.monotonic()
    command = small_run.command(material, undisturbed, steps=options.steps, further=keys)
    log = undisturbed.with_suffix(".log")
    with log.open("wb") as output:
        status = subprocess.call(command, stdout=output, stderr=output)
    if status:
        raise RuntimeError(f"the run ended with status {status}; see {log}")
    longest = time.monotonic() - begun
    chance, killed, finished, status = random.Random(options.seed), Counter[str](), 0, 0
    while (left := options.kills - killed.total()) > 0:
        run_dir = options.directory / f"killed_{finished}"
        shutil.rmtree(run_dir, ignore_errors=True)
        command = small_run.command(material, run_dir, steps=options.steps, further=keys)
        killed += disturb(command, run_dir, chance=chance, longest=longest, kills=left, ports=ports)
        finished += 1
        different = small_run.differences(run_dir, undisturbed)
        if small_run.kept(run_dir) != small_run.kept(undisturbed):
            different.append(f"checkpoints/ holds {', '.join(small_run.kept(run_dir))}")
        status |= bool(different)
        small_run.report(run_dir, different, killed=killed, finished=finished)
    return status


def disturb(
    command: list[str],
    run_dir: Path,
    *,
    chance: random.Random,
    longest: float,
    kills: int,
    ports: Sequence[int],
) -> Counter[str]:
    """Runs a command to its end, after up to `kills` kills; counts the kills by the activity that
    they interrupted.

    Raises:
      RuntimeError: if the run fails for another reason, or comes no further.
    """
    killed, log = Counter[str](), run_dir.with_suffix(".log")
    while True:
        before = _saved(run_dir)
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            while killed.total() < kills and process.poll() is None:
                _wait(process, run_dir, before=before, chance=chance, longest=longest)
                if process.poll() is not None:
                    break
                # One server must survive, otherwise the run ends with an error.
                if ports and chance.random() < 0.25 and all(map(healthy, ports)):
                    killed["server"] += kill_server(chance.choice(ports))
                    before = _saved(run_dir)
                    continue
                killed[_activity(run_dir, before=before)] += 1
                process.send_signal(signal.SIGKILL)
                break
            if process.wait(PATIENCE) == 0:
                return killed
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the run came no further within {PATIENCE:.0f} s; see {log}"
            ) from error
        finally:
            process.kill()
            process.wait()
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
    """Waits: one time in four for any moment of a start, else for one after its first step.

    Raises:
      subprocess.TimeoutExpired: if no step comes.
    """
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, longest))
        return
    until = time.monotonic() + PATIENCE
    while process.poll() is None and _saved(run_dir) == before:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(process.args, PATIENCE)
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
