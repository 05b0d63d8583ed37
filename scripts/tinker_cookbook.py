"""Runs recipes of the Tinker cookbook, unmodified, against `jaxrl tinker` and a tiny model.

The cookbook needs an environment of its own, and Qwen3's tokenizer (scripts/fetch_tokenizers.sh):

    python -m venv .venv-cookbook
    .venv-cookbook/bin/pip install tinker-cookbook[math-rl]==0.6.1
    python scripts/tinker_cookbook.py --python .venv-cookbook/bin/python

The recipes name a model and data sets of the hub. In the folder where they run, paths of these
names hold a tiny random model with the published tokenizer and a few rows of the same form. The
model that sl_loop trains is the teacher of the distillation. The recipes' own numbers go to the
standard output, as JSON lines.
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
RL = ("groups_per_batch=4", "group_size=4", "max_tokens=48", "learning_rate=1e-3", "lora_rank=32")
RL += ("behavior_if_log_dir_exists=delete",)
RECIPES = {
    "sl_loop": ("batch_size=8", "max_length=256", "learning_rate=1e-2"),
    "rl_loop": ("batch_size=2", "group_size=4", "max_tokens=8", "loss_fn=importance_sampling"),
    "preference.dpo.train": (
        "dataset=hhh",
        "batch_size=8",
        "max_length=256",
        "learning_rate=1e-2",
        "lr_schedule=constant",
        "behavior_if_log_dir_exists=delete",
    ),
    "distillation.on_policy_distillation": (
        f"teacher_model={MODEL}",
        "dataset=deepmath",
        "loss_fn=importance_sampling",
        *RL,
    ),
}
SHOWN = {
    "sl_loop": ("train_mean_nll",),
    "rl_loop": ("reward/total",),
    "preference.dpo.train": ("dpo_loss", "margin"),
    "distillation.on_policy_distillation": ("teacher_kl",),
}


def write_model(directory: Path) -> None:
    """Writes a tiny random model with Qwen3's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = huggingface.from_hf_config(
        make_arithmetic.TINY | ids | {"max_position_embeddings": 2048}
    )
    f32 = jnp.dtype(jnp.float32)
    params = models.init(models.param_specs(config), jax.random.key(0), dtype=f32)
    huggingface.save(directory, params, config, dtype=f32)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, directory)


def write_data(place: Path) -> None:
    """Writes rows in the form of the recipes' data sets."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(512)]
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
    ask = "\n\nHuman: What is {} + {}?\n\nAssistant: It is {}."
    preferred = [
        {"chosen": ask.format(a, b, a + b), "rejected": ask.format(a, b, "not known")}
        for a, b in pairs
    ]
    write_rows(place / "HuggingFaceH4/no_robots", robots)
    write_rows(place / "openai/gsm8k", school)
    write_rows(place / "Anthropic/hh-rlhf", preferred)
    write_rows(place / "zwhe99/DeepMath-103K", school)


def write_rows(directory: Path, rows: list[dict[str, object]]) -> None:
    """Writes a data set with the splits train and test, which has the first rows alone."""
    directory.mkdir(parents=True)
    about = "---\nconfigs:\n- config_name: main\n  default: true\n  data_files:\n"
    for split, own in (("train", rows), ("test", rows[:4])):
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, own)))
        about += f"  - split: {split}\n    path: {split}.jsonl\n"
    (directory / "README.md").write_text(about + "---\n")


def trained(place: Path) -> dict[str, str]:
    """Returns the last checkpoint of sl_loop."""
    return json.loads((place / "sl_loop/checkpoints.jsonl").read_text().splitlines()[-1])


def show(place: Path, name: str) -> None:
    """Prints a recipe's numbers of each step."""
    for line in (place / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = {key: round(row[key], 4) for key in SHOWN[name] if key in row}
        if found:
            print(json.dumps({"recipe": name, "step": row.get("step")} | found), flush=True)


def main() -> None:
    """Starts the server, runs the recipes and prints their metrics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter with tinker-cookbook")
    parser.add_argument("--steps", type=int, default=12)
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
                steps = arguments.steps * (4 if name == "sl_loop" else 1)
                module = ["-m", f"tinker_cookbook.recipes.{name}"]
                run = [python, *module, f"model_name={MODEL}", *RECIPES[name]]
                run += [f"max_steps={steps}", f"log_path={name}"]
                if name.startswith("distillation"):
                    run.append(f"teacher_checkpoint={trained(place)['sampler_path']}")
                subprocess.run(run, cwd=place, env=client, check=True)
                show(place, name)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
