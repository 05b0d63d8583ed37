"""Training runs of experiments, each trained once and kept."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands.compile_cache import use_compile_cache
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.monitoring.tracking.tracking import read_metrics
from jaxrl.train import train

CONFIGS = Path(__file__).parents[2] / "configs"
Entries = list[dict[str, Any]]  # lines of metrics.jsonl


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Makes a parser with --base, for programs that start from the quickstart's model."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--base", type=Path, default=Path("runs/quickstart"))
    return made


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
    """Returns the metrics of a run; trains or resumes it first if it is not complete. Among the
    changes of the config file is "run_dir".

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
