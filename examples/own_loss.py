"""A custom loss: SAPO's soft gate in place of PPO's clip, plus a KL term.

./scripts/quickstart.sh          # makes the model and the data, once
python examples/own_loss.py      # five steps: half a minute on 2 CPU cores
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxrl
from jaxrl.losses import grpo, kl_penalty, objective, over_sampler, surrogate, token_mean


def soft_gate(ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """Computes a loss per token, f32[B, T]; its gradient fades as the ratio leaves 1."""
    temperature = jnp.where(advantages > 0, 1.0, 1.05)
    return -advantages * jax.nn.sigmoid(temperature * (ratio - 1)) * 4 / temperature


# The learner computes the scores that the terms read (here also the reference's), and no others.
loss = surrogate(soft_gate, over_sampler) + 0.001 * kl_penalty()
print("minimises", loss)

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
examples = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
base = jaxrl.load(directory / "sft/model")
precision = "fp32"
learner = jaxrl.make_learner(
    base.model, objective(loss, token_mean), optimizer=optax.adamw(2e-4), precision=precision
)
sampler = jaxrl.EmbeddedSampler(base.model, base.params, precision=precision, max_batch=256)
score, step = jaxrl.jit(learner.score), jaxrl.jit(learner.step, donate_argnums=0)
reference = jax.tree.map(jnp.copy, base.params)  # the step donates its own copy
state = learner.init(base.params)

for i in range(5):
    rollouts = jaxrl.rollouts(
        sampler,
        examples[32 * i : 32 * (i + 1)],
        tokenizer=base.tokenizer,
        reward=lambda completion, example: float(completion.split()[-1:] == [example["answer"]]),
        params=jaxrl.SamplingParams(max_tokens=36, stop=base.stop, seed=i),
        group_size=8,
    )
    batch = jaxrl.minibatch(rollouts, grpo().advantages, row_length=48)
    batch = dataclasses.replace(batch, reference=score(reference, batch))
    state, metrics = step(state, batch)
    sampler.load(state.params, version=i + 1)
    numbers = jaxrl.to_floats(metrics)
    reward = sum(r.reward for r in rollouts) / len(rollouts)
    print(f"step {i + 1}: reward {reward:.3f}, KL from the reference {numbers['kl/reference']:.2e}")
