"""Iterations of TRL's GRPOTrainer: run_trl.py MODEL PROMPTS ROWS, in an environment with trl."""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from pace import ANSWER, GROUP, LEARNING_RATE, PROMPTS, Pace, reward
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    model, prompts, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    examples = [json.loads(line) for line in prompts.read_text().splitlines()]
    pace = Pace()

    def paced(completions: list[str], **_: object) -> list[float]:
        pace(len(completions))
        return [reward(text) for text in completions]

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=PROMPTS * GROUP // rows,
            num_generations=GROUP,
            max_completion_length=ANSWER,
            learning_rate=LEARNING_RATE,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            max_steps=10**6,
        )
        GRPOTrainer(
            model, reward_funcs=paced, args=config, train_dataset=Dataset.from_list(examples)
        ).train()


if __name__ == "__main__":
    main()
