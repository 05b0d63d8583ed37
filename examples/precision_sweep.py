"""The same run under four precisions; plots how far learner and sampler disagree in each.

./scripts/quickstart.sh               # makes the model and the data, once
python examples/precision_sweep.py    # a minute and a half on 2 CPU cores
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import optax

import jaxrl
from jaxrl.losses import grpo

PRECISIONS = ("fp32", "bf16_master", "fp16_master", "phantom")
STEPS = 6
directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
out = Path(sys.argv[2] if len(sys.argv) > 2 else "precision_sweep.png")
examples = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]


def reward(completion: str, example: dict) -> float:
    return float(completion.split()[-1:] == [example["answer"]])


def run(precision: str) -> list[float]:
    """Measures the mismatch before each update: mean of exp |log pi - log mu|, minus 1."""
    base, recipe = jaxrl.load(directory / "sft/model", precision=precision), grpo()
    learner = jaxrl.make_learner(
        base.model, recipe.objective, optimizer=optax.adamw(2e-4), precision=precision
    )
    sampler = jaxrl.EmbeddedSampler(base.model, base.params, precision=precision)
    step, state = jaxrl.jit(learner.step, donate_argnums=0), learner.init(base.params)
    found = []
    for i in range(STEPS):
        rollouts = jaxrl.rollouts(
            sampler,
            examples[8 * i : 8 * (i + 1)],
            tokenizer=base.tokenizer,
            reward=reward,
            params=jaxrl.SamplingParams(max_tokens=36, stop=base.stop, seed=i),
            group_size=8,
        )
        batch = jaxrl.minibatch(rollouts, recipe.advantages, row_length=48)
        state, metrics = step(state, batch)
        sampler.load(state.params, version=i + 1)
        found.append(jaxrl.to_floats(metrics)["mismatch/token_mult_error"] - 1)
    return found


for name in PRECISIONS:
    values = run(name)
    print(f"{name}: mean mismatch {sum(values) / STEPS:.1e}")
    plt.semilogy(range(1, STEPS + 1), values, marker="o", label=name)
plt.xlabel("step")
plt.ylabel("mismatch of a token: exp |log pi - log mu| - 1")
plt.legend()
plt.savefig(out, dpi=150, bbox_inches="tight")
print(out)
