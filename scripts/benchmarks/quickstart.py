"""What scripts/quickstart.sh has made, as keys of a config."""

from pathlib import Path


def material(base: Path) -> dict[str, str]:
    """The base model and the data.

    Args:
      base: runs/quickstart, or where else they lie.
    """
    return {
        "model.path": str(base / "sft" / "model"),
        "data.path": str(base / "train.jsonl"),
        "data.eval_path": str(base / "held_out.jsonl"),
    }
