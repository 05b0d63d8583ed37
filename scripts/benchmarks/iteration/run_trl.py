"""Iterations of TRL's GRPOTrainer: run_trl.py MODEL PROMPTS ROWS [step], where trl is.

With `step`, each iteration learns from the first one's completions and samples none.
"""

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from pace import ANSWER, GROUP, LEARNING_RATE, PROMPTS, Pace
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    model, prompts, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    examples = [json.loads(line) for line in prompts.read_text().splitlines()]
    pace = Pace()

    class Learner(GRPOTrainer):
        """Learns from the same completions again and again."""

        kept = None

        def _generate_and_score_completions(self, inputs):
            if self.kept is None:
                self.kept = super()._generate_and_score_completions(inputs)
            else:
                pace.count(PROMPTS * GROUP)
            return self.kept

    trainer = Learner if sys.argv[4:] == ["step"] else GRPOTrainer
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
        data = Dataset.from_list(examples)
        trainer(model, reward_funcs=pace.reward, args=config, train_dataset=data).train()


if __name__ == "__main__":
    main()
