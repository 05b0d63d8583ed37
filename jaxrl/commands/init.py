"""Writes the three files of a first run into a directory: config.toml, rewards.py and
data.jsonl. Replace the data and the reward with your own.

  jaxrl init first && cd first
  jaxrl train config.toml --model.path DIR"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jaxrl.commands import options

CONFIG = """\
# One run: jaxrl train config.toml. Rerun the same command to resume.
# Every key is also an option: --train.steps 50. All keys: jaxrl train --help all.

precision = "bf16_master"  # bf16 arithmetic, f32 master weights; or fp32, fp16_master
run_dir = "runs/first"     # the trained model, checkpoints and metrics

[model]
path = "Qwen/Qwen2.5-0.5B-Instruct"  # on the Hugging Face hub, or a directory

[data]
path = "data.jsonl"        # one row per line; or "data/*.parquet", or the hub: "openai/gsm8k:main"
prompt_key = "question"
answer_key = "answer"
system_prompt = "Answer with the number alone."  # needs a chat template
max_prompt_tokens = 128    # longer prompts are dropped and counted
# eval_path = "held_out.jsonl"

[reward]
path = ["rewards.py:score"]  # or a built-in one, such as "numeric_match"

[loss]
name = "grpo"              # jaxrl losses lists the others
# kl = 0.001               # keeps the policy near the initial model

[sampling]
max_tokens = 128           # a model that thinks first, such as Qwen3, needs thousands

[train]
steps = 100
train_batch = 8            # prompts per step
group_size = 8             # completions per prompt
microbatch_tokens = 4096   # changes speed and memory, never the result

[optimizer]
learning_rate = 1e-6

# In place of sampling in JAX, a vLLM server (jaxrl serve) on a GPU of its own:
# [sampler]
# name = "vllm"
# url = ["http://127.0.0.1:8000"]
"""

REWARD = '''\
"""The reward of a completion."""


def score(completion: str, example: dict) -> float:
    """Returns 1 if the completion's last word is the answer; `example` is the row of the data."""
    return float(completion.strip().rstrip(".").split()[-1:] == [example["answer"]])
'''

ROWS = [
    {"question": f"What is {a} + {b}?", "answer": str(a + b)}
    for a, b in zip(range(12, 92, 5), range(87, 39, -3), strict=True)
]


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("init", __doc__)
    made.add_argument("directory", type=Path, nargs="?", default=Path("."), help="default: .")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    directory = parser().parse_args(argv).directory
    files = {
        "config.toml": CONFIG,
        "rewards.py": REWARD,
        "data.jsonl": "".join(f"{json.dumps(row)}\n" for row in ROWS),
    }
    if there := [str(directory / name) for name in files if (directory / name).exists()]:
        raise ValueError(f"{', '.join(there)}: exists and is not overwritten; name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
        print(directory / name)
    print(
        "next: set model.path in config.toml, then run in that directory: jaxrl train config.toml"
    )
    return 0
