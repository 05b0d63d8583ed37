"""GRPO from its parts: three steps on the model that `./scripts/quickstart.sh` makes."""

import json
import sys
from pathlib import Path

import optax

import jaxrl

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
examples = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
base = jaxrl.load(directory / "sft/model")
recipe = jaxrl.grpo()
learner = jaxrl.make_learner(base.model, recipe.objective, optimizer=optax.adamw(2e-4))
sampler = jaxrl.EmbeddedSampler(base.model, base.params, max_batch=256)
step, state = jaxrl.jit(learner.step, donate_argnums=0), learner.init(base.params)


def reward(completion: str, example: dict) -> float:
    return float(completion.split()[-1:] == [example["answer"]])


for i in range(3):
    prompts = examples[32 * i : 32 * (i + 1)]
    params = jaxrl.SamplingParams(max_tokens=36, stop=base.stop, seed=i)
    rollouts = jaxrl.rollouts(
        sampler, prompts, params=params, tokenizer=base.tokenizer, reward=reward, group_size=8
    )
    batch = jaxrl.minibatch(rollouts, recipe.advantages)
    state, metrics = step(state, batch)
    sampler.load(state.params, version=i + 1)
    score = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    print(f"step {i + 1}: reward {score:.3f}, KL {jaxrl.to_floats(metrics)['mismatch/kl']:.1e}")
