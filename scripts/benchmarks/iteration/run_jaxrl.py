"""Iterations of `jaxrl train`: run_jaxrl.py MODEL PROMPTS ROWS PRECISION."""

import functools
import sys
import tempfile

from pace import ANSWER, GROUP, LEARNING_RATE, PROMPT, PROMPTS, Pace

from jaxrl.cli import main as jaxrl

_pace = functools.cache(Pace)  # in the module that jaxrl loads, not in this program


def paced(completion: str, example: dict) -> float:
    """The reward of the run."""
    del example
    return _pace().reward([completion])[0]


def main() -> None:
    model, prompts, rows, precision = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        keys = {
            "precision": precision,
            "run_dir": directory,
            "model.path": model,
            "data.path": prompts,
            "reward.path": f"{__file__}:paced",
            "reward.timeout": 10**6,
            "data.max_prompt_tokens": PROMPT,
            "sampling.max_tokens": ANSWER,
            "loss.kl": 0.0,
            "train.steps": 10**6,
            "train.train_batch": PROMPTS,
            "train.group_size": GROUP,
            "train.microbatch_tokens": int(rows) * (PROMPT + ANSWER),
            "optimizer.learning_rate": LEARNING_RATE,
            "checkpoint.every": 10**6,
        }
        sys.exit(jaxrl(["train", *(f"--{key}={value}" for key, value in keys.items())]))


if __name__ == "__main__":
    main()
