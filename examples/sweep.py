"""Three seeds of one run in a single program: `vmap` over their states, `scan` over minibatches.

./scripts/quickstart.sh       # makes the model and the data, once
python examples/sweep.py      # four rounds
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxrl

SEEDS, ROUNDS, PROMPTS = 3, 4, 8
directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
examples = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
base = jaxrl.load(directory / "sft/model")
recipe = jaxrl.grpo()
learner = jaxrl.make_learner(base.model, recipe.objective, optimizer=optax.adamw(2e-4))
sampler = jaxrl.EmbeddedSampler(base.model, base.params, max_batch=256)

# The step is plain inside our own function, which is compiled once, outermost.
train = jaxrl.jit(jax.vmap(functools.partial(jax.lax.scan, learner.step)), donate_argnums=0)


def stack(trees: list) -> object:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def reward(completion: str, example: dict) -> float:
    return float(completion.split()[-1:] == [example["answer"]])


def sample(prompts: list, *, seed: int) -> list:
    params = jaxrl.SamplingParams(max_tokens=36, stop=base.stop, seed=seed)
    return jaxrl.rollouts(
        sampler, prompts, params=params, tokenizer=base.tokenizer, reward=reward, group_size=8
    )


states = stack([learner.init(base.params) for _ in range(SEEDS)])
for i in range(ROUNDS):
    batches, scores = [], []
    for seed in range(SEEDS):
        sampler.load(jax.tree.map(lambda leaf, s=seed: leaf[s], states.params), version=i)
        firsts = (2 * i * PROMPTS, (2 * i + 1) * PROMPTS)  # two minibatches, on-policy the first
        drawn = [sample(examples[n : n + PROMPTS], seed=seed) for n in firsts]
        scores.append(sum(r.reward for some in drawn for r in some) / sum(map(len, drawn)))
        packed = [jaxrl.minibatch(some, recipe.advantages, row_length=48) for some in drawn]
        batches.append(stack(packed))
    states, metrics = train(states, stack(batches))  # [seeds, minibatches, rows, tokens]
    print(f"round {i + 1}: reward by seed", *(f"{score:.3f}" for score in scores))
