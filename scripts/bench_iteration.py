"""Measures whole iterations (sample, reward, learn, publish), as JSON lines: ours and our peers'.

scripts/install_peers.sh    # TRL and Tunix, in environments of their own
python scripts/bench_iteration.py --peers .venv-peers

All programs have the same model, prompts, lengths and learning rate, and take their iterations in
turn. Peers compute in f32.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from benchmarks.iteration.pace import ANSWER, GROUP, PROMPT, PROMPTS
from benchmarks.shapes import SHAPES
from benchmarks.timing import alternate, compared, write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.models import huggingface, spec
from jaxrl.models.parameters import param_specs

PROGRAMS = Path(__file__).parent / "benchmarks/iteration"
TOKENS = PROMPTS * GROUP * (PROMPT + ANSWER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16_master"])
    parser.add_argument("--rows", type=int, default=4, help="sequences per microbatch of jaxrl")
    parser.add_argument("--peers", type=Path, help="directory of scripts/install_peers.sh")
    parser.add_argument("--peer-rows", type=int, default=16, help="sequences per microbatch")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as programs:
        material = write_material(Path(made), args.shape)
        commands = {
            f"jaxrl {precision}": [sys.executable, "run_jaxrl.py", *material, args.rows, precision]
            for precision in args.precisions
        }
        for python in args.peers.resolve().glob("*/bin/python") if args.peers else ():
            peer = python.parts[-3]
            commands[peer] = [python, f"run_{peer}.py", *material, args.peer_rows]
        runs = {
            name: programs.enter_context(started([str(part) for part in command]))
            for name, command in commands.items()
        }
        seconds = alternate(runs, repetitions=args.repetitions)
    row = {"shape": args.shape, "prompts": PROMPTS, "group": GROUP}
    row |= {"prompt": PROMPT, "completion": ANSWER}
    rates = {name: [TOKENS / s for s in values] for name, values in seconds.items()}
    write(row | compared(rates, ours=f"jaxrl {args.precisions[0]}"), args.out)


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
    lines = [json.dumps(prompt) + "\n" for prompt in prompts]
    (directory / "prompts.jsonl").write_text("".join(lines))
    return directory / "model", directory / "prompts.jsonl"


@contextlib.contextmanager
def started(command):
    """Starts a program; yields a function that lets it take one iteration."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    program = subprocess.Popen(
        command, cwd=PROGRAMS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )

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


if __name__ == "__main__":
    main()
