"""The quickstart's material, small: an untrained model with its tokenizer, and additions."""

import importlib.util
import random
from pathlib import Path

_PATH = Path(__file__).parent.parent / "scripts" / "make_arithmetic.py"
_SPEC = importlib.util.spec_from_file_location("make_arithmetic", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
script = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(script)

TINY = script.TINY


def write(directory: Path) -> None:
    """DIRECTORY/untrained and sft.jsonl, train.jsonl, held_out.jsonl beside it."""
    script.write_model(directory / "untrained", TINY, seed=0)
    sizes = {"sft": 64, "train": 16, "held_out": 8}
    script.write_texts(directory, sizes, rng=random.Random(0))
