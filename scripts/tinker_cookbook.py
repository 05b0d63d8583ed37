"""Runs recipes of the Tinker cookbook, unmodified, against `jaxrl tinker` and a tiny model.

The cookbook needs an environment of its own, and Qwen3's tokenizer (scripts/fetch_tokenizers.sh):

    python -m venv .venv-cookbook
    .venv-cookbook/bin/pip install tinker-cookbook[math-rl]==0.6.1
    python scripts/tinker_cookbook.py --python .venv-cookbook/bin/python

The recipes name a model and data sets of the hub. In the folder where they run, paths of these
names hold a tiny random model with the published tokenizer and a few rows of the same form.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import make_arithmetic
from transformers import AutoTokenizer

from jaxrl import huggingface, models

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / ".cache" / "tokenizers" / "qwen3"
MODEL = "Qwen/Qwen3-8B"
RECIPES = {
    "sl_loop": ("batch_size=8", "max_length=256", "learning_rate=3e-3"),
    "rl_loop": ("batch_size=2", "group_size=4", "max_tokens=8", "loss_fn=importance_sampling"),
}


def write_model(directory: Path) -> None:
    """Writes a tiny random model with Qwen3's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = huggingface.from_hf_config(
        make_arithmetic.TINY | ids | {"max_position_embeddings": 1024}
    )
    f32 = jnp.dtype(jnp.float32)
    params = models.init(models.param_specs(config), jax.random.key(0), dtype=f32)
    huggingface.save(directory, params, config, dtype=f32)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, directory)


def write_data(place: Path) -> None:
    """Writes rows in the form of the recipes' data sets."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(64)]
    robots = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"It is {a + b}."},
            ]
        }
        for a, b in pairs
    ]
    school = [{"question": f"What is {a} + {b}?", "answer": f"So #### {a + b}"} for a, b in pairs]
    for name, rows in (("HuggingFaceH4/no_robots", robots), ("openai/gsm8k", school)):
        directory = place / name
        directory.mkdir(parents=True)
        (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (directory / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  default: true\n  data_files:\n"
            "  - split: train\n    path: train.jsonl\n---\n"
        )


def main() -> None:
    """Starts the server, runs the recipes and prints their metrics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter with tinker-cookbook")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    arguments = parser.parse_args()
    python = os.path.abspath(arguments.python)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write_model(place / MODEL)
        write_data(place)
        command = [sys.executable, "-m", "jaxrl", "tinker", MODEL, "--port", "0"]
        command += ["--precision", "fp32", "--state_dir", "state"]
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, cwd=place, env=own, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline().removeprefix("export ").strip() for _ in range(2)]
            client = os.environ | dict(line.split("=", 1) for line in lines)
            for name in arguments.recipes:
                run = [python, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={MODEL}"]
                run += [*RECIPES[name], f"max_steps={arguments.steps}", f"log_path={name}"]
                subprocess.run(run, cwd=place, env=client, check=True)
                print((place / name / "metrics.jsonl").read_text(), flush=True)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
