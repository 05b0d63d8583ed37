"""Damages one file of a run directory, resumes the run, and judges the outcome; many times.

    python scripts/damage_loop.py runs/damage [--number 300] [--seed 0]

Needs no model and no server. A resume is right if its files equal an undisturbed run's, bit for
bit, or if it refuses with an error that names the file; a damaged log may miss lines. Anything else
(another result, an error that names no file, a traceback) is printed with the damage, and the
status is 1. A resume that hangs ends the program with a stack trace.
"""

import contextlib
import faulthandler
import io
import json
import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import small_run
from experiments.runs import plain_parser

from jaxrl.commands.compile_cache import use_compile_cache
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.train import train

STEPS = 3
KINDS = ("deleted", "emptied", "truncated", "flipped", "directory", "fifo", "link", "dangling")
_LONGEST = 120.0  # seconds of a resume
_WRITTEN_ONLY = ("model", "tensorboard", "curves.png")  # no resume reads them
_LOGS = ("metrics.jsonl", "samples.jsonl")
_REFUSALS = (ValueError, OSError, RuntimeError)  # that the command line prints as one message


def main() -> int:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    use_compile_cache()
    chance, outcomes, wrong = random.Random(options.seed), Counter[tuple[str, str]](), 0
    material, run_dir = options.directory / "material", options.directory / "run"
    base = write_base(material, run_dir)
    for number in range(options.number):
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(base, run_dir)
        path, kind = chance.choice(files(run_dir)), chance.choice(KINDS)
        described = damage(path, kind, chance=chance)
        faulthandler.dump_traceback_later(_LONGEST, exit=True)
        outcome, text = judge(material, run_dir, base=base, path=path)
        faulthandler.cancel_dump_traceback_later()
        outcomes[kind, outcome] += 1
        if outcome not in ("same", "refused"):
            wrong += 1
            print(f"{number}: {path.relative_to(run_dir)} {described}: {outcome}: {text}")
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{kind:10} {outcome:10} {count}")
    print(f"{options.number} damages, {wrong} wrong")
    return int(wrong > 0)


def write_base(material: Path, run_dir: Path) -> Path:
    """Trains a run with two checkpoints and a rollback; returns a copy of its directory."""
    base = run_dir.with_name("undamaged")
    small_run.write_material(material)
    for directory in (run_dir, base):
        shutil.rmtree(directory, ignore_errors=True)
    resume(material, run_dir)
    rollback = {"alarm": "kl_spike", "at": 2, "to": 1, "text": "made up", "done": True}
    rollback |= {"changes": {"train.group_size": [4, 4]}, "value": 0.2, "limit": 0.1}
    (run_dir / "rollbacks.json").write_text(json.dumps([rollback]))
    for name in ("rolled_back_1.jsonl", "rolled_back_1_samples.jsonl"):
        (run_dir / name).write_text('{"step": 2}\n')
    shutil.copytree(run_dir, base)
    return base


def resume(material: Path, run_dir: Path) -> None:
    """Trains or resumes the run in this process."""
    keys = small_run.overrides(material, run_dir, steps=STEPS)
    train(toml_file.load(Config, overrides=list(keys.items())))


def files(run_dir: Path) -> list[Path]:
    """Returns everything in a run directory that a resume may read, directories too."""
    tops = [path for path in run_dir.iterdir() if path.name not in _WRITTEN_ONLY]
    return sorted({path for top in tops for path in (top, *top.rglob("*"))})


def damage(path: Path, kind: str, *, chance: random.Random) -> str:
    """Damages a file or a directory; returns the damage in words."""
    if kind in ("emptied", "truncated", "flipped") and path.is_file():
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content)) if content else 0
        bit = 1 << chance.randrange(8)
        if kind == "flipped" and content:
            content[place] ^= bit
            path.write_bytes(content)
            return f"bit {bit} of byte {place} flipped"
        path.write_bytes(content[: place * (kind == "truncated")])
        return f"{kind} after {place} bytes" if kind == "truncated" else kind
    copy = path.with_name(path.name + "_copy") if kind == "link" else path
    if kind == "link":
        path.rename(copy)
        path.symlink_to(copy.name)
    else:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "dangling":
            path.symlink_to("nothing")
    return kind


def judge(material: Path, run_dir: Path, *, base: Path, path: Path) -> tuple[str, str]:
    """Resumes a damaged run; returns the outcome, and the message of an error."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            resume(material, run_dir)
    except _REFUSALS as error:
        inside = path.relative_to(run_dir).parts
        name = "/".join(inside[:2]) if inside[0] == "checkpoints" else inside[0]
        return ("refused" if name in str(error) else "UNNAMED"), f"{type(error).__name__}: {error}"
    except Exception as error:
        return "TRACEBACK", f"{type(error).__name__}: {error}"
    lost = [path.name] * (path.name in _LOGS)  # nothing else has a log's lines
    different = [name for name in small_run.differences(run_dir, base) if name not in lost]
    return ("DIFFERENT" if different else "same"), ", ".join(different)


if __name__ == "__main__":
    sys.exit(main())
