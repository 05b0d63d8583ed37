"""TRL and Tunix in their own environments, and the model and prompts of all trainers."""

import contextlib
import dataclasses
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import make_arithmetic
from benchmarks.iteration.pace import PROMPT, PROMPTS
from benchmarks.shapes import SHAPES
from benchmarks.timing import Run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl import huggingface
from jaxrl.models import param_specs, spec

PROGRAMS = Path(__file__).parent / "iteration"
NAMES = {"trl": "TRL", "google_tunix": "Tunix"}  # of packages


def installed(directory: Path) -> dict[str, list[str]]:
    """Maps the name and version of peers from scripts/install_peers.sh to their command."""
    found = {}
    for package, name in NAMES.items():
        for info in directory.resolve().glob(f"*/lib/*/site-packages/{package}-*.dist-info"):
            version = info.name.removesuffix(".dist-info").rpartition("-")[2]
            environment = info.parents[3]
            command = [str(environment / "bin/python"), f"run_{environment.name}.py"]
            found[f"{name} {version}"] = command
    if not found:
        raise SystemExit(
            f"--peers {directory}: no environment with TRL or Tunix; run scripts/install_peers.sh"
        )
    return found


def write_material(directory: Path, shape: str) -> tuple[Path, Path]:
    """Writes a model with random weights, and prompts of `PROMPT` words, each a token."""
    config = dataclasses.replace(SHAPES[shape], pad_id=0, eos_ids=(1,))
    f32 = jnp.dtype(jnp.float32)
    params = spec.init(param_specs(config), jax.random.key(0), dtype=f32)
    huggingface.save(directory / "model", params, config, dtype=f32)
    words = [f"w{i}" for i in range(2, config.vocab_size)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(directory / "model")
    rng = random.Random(0)
    prompts = [
        {"prompt": " ".join(rng.choices(words, k=PROMPT)), "answer": ""}
        for _ in range(64 * PROMPTS)
    ]
    make_arithmetic.write_rows(directory / "prompts.jsonl", prompts)
    return directory / "model", directory / "prompts.jsonl"


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[Run]:
    """Starts a program of `iteration`; yields a function that lets it take one iteration."""
    command = [str(argument) for argument in arguments]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    program = subprocess.Popen(
        command, cwd=PROGRAMS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )

    assert program.stdin is not None
    assert program.stdout is not None

    def wait() -> None:
        if not program.stdout.readline():
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} ended: {log.read()[-3000:]}")

    def iterate(_: int) -> None:
        program.stdin.write("\n")
        program.stdin.flush()
        wait()

    try:
        wait()  # it has loaded everything and sampled for the first time
        yield iterate
    finally:
        program.kill()
        program.wait()
