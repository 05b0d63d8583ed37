"""GRPO from its parts: a small model learns to add.

    ./scripts/quickstart.sh       # makes the model and the data, once
    python examples/grpo.py       # three steps: half a minute on 2 CPU cores
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import optax

import jaxrl
from jaxrl.losses import grpo

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
examples = [json.loads(line) for line in (directory / "train.jsonl").open()]
policy = jaxrl.load(directory / "sft/model")
precision = jaxrl.Precision.parse("fp32")  # or bf16_master, fp16_master, "fp32,sampler=bf16", ...
recipe = grpo()


def reward(completion: str, example: dict) -> float:
    return float(completion.split()[-1:] == [example["answer"]])


rows = {"rows_per_microbatch": 64}
learner = jaxrl.make_learner(
    policy.model, recipe.objective, optimizer=optax.adamw(2e-4), precision=precision, **rows
)
sampler = jaxrl.EmbeddedSampler(policy.model, policy.params, precision=precision, max_batch=256)
sampling = jaxrl.SamplingParams(max_tokens=36, stop=policy.stop)
step, state = jax.jit(learner.step, donate_argnums=0), learner.init(policy.params)
for i in range(3):
    rollouts = jaxrl.rollouts(sampler, examples[32 * i : 32 * (i + 1)], group_size=8, reward=reward,
                              tokenizer=policy.tokenizer, params=dataclasses.replace(sampling, seed=i))  # fmt: skip
    batch = jaxrl.minibatch(rollouts, recipe.advantages, row_length=48, **rows)
    state, metrics = step(state, batch)
    sampler.load(state.params, version=i + 1)
    print(i, sum(r.reward for r in rollouts) / len(rollouts), jaxrl.to_floats(metrics)["grad_norm"])
