"""Training runs of experiments, each trained once and kept."""

import argparse
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.commands.compile_cache import use_compile_cache
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.tracking.tracker import read_metrics
from jaxrl.train import train

CONFIGS = Path(__file__).parents[2] / "configs"
Entries = list[dict[str, Any]]  # lines of metrics.jsonl


def plain_parser(doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser whose help shows `doc` as it is."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser with --base, for programs that start from the quickstart's model."""
    made = plain_parser(doc)
    made.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    return made


def exit_on_sigterm() -> None:
    """Lets SIGTERM raise SystemExit, so that a program ends the processes that it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def quickstart(base: Path) -> dict[str, str]:
    """Returns config keys for the model and data that scripts/quickstart.sh wrote to `base`."""
    return {
        "model.path": str(base / "sft" / "model"),
        "data.path": str(base / "train.jsonl"),
        "data.eval_path": str(base / "held_out.jsonl"),
    }


def config(file: Path, changes: Mapping[str, object]) -> Config:
    """Loads a config file with changed keys."""
    overrides = [(key, str(value)) for key, value in changes.items()]
    return toml_file.load(Config, file=file, overrides=overrides)


def finished(run_dir: Path) -> bool:
    """Tells if a run is complete: its curves are the last file that it writes."""
    return (run_dir / "curves.png").exists()


def trained(file: Path, changes: Mapping[str, object]) -> Entries:
    """Returns a run's metrics; trains or resumes it first if it is not complete. "run_dir" is among
    the changes.

    Raises:
      KeyboardInterrupt: if a signal ended the run.
    """
    run_dir = Path(str(changes["run_dir"]))
    if not finished(run_dir):
        use_compile_cache()
        changed = config(file, changes)
        if changed.sampler.url:  # a new server's address; a resumed run must keep its config
            shutil.rmtree(run_dir, ignore_errors=True)
        if train(changed).signum is not None:
            raise KeyboardInterrupt
    return read_metrics(run_dir / "metrics.jsonl")


def rollouts(entries: Entries) -> Entries:
    """Selects the entries of training steps."""
    return [e for e in entries if "reward" in e]


def accuracies(entries: Entries) -> dict[int, float]:
    """Maps each evaluated step to its held-out accuracy."""
    return {e["step"]: e["eval/accuracy"] for e in entries if e.get("eval/accuracy") is not None}


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Formats a Markdown table; each row maps the headings to its cells."""
    lines = [list(row.values()) for row in rows]
    head = list(next(iter(rows), {}))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *lines))


def write_table(document: Path, name: str, table: str) -> None:
    """Replaces the table between a name's marks, or adds one after the last table."""
    text, begin, end = document.read_text(), f"<!-- table: {name} -->\n", "<!-- end of table -->\n"
    if begin in text:
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
    else:
        before, _, tail = text.rpartition(end)
        head = f"{before}{end}\n"
    document.write_text(head + begin + table + end + tail)


def spread(values: Sequence[float] | np.ndarray, form: str = "{:.3f}") -> str:
    """Formats the mean with the range in brackets, or a single value."""
    numbers = np.asarray(values, float)
    if np.isnan(numbers).any():
        return "-"
    low, high = (form.format(x) for x in (numbers.min(), numbers.max()))
    mean = form.format(numbers.mean())
    return mean if low == high else f"{mean} ({low} to {high})"
