"""Samples from a vLLM server while the learner trains: completions are one version old at most.

./scripts/quickstart.sh && ./scripts/install_vllm.sh    # once
python examples/async_vllm.py    # eight steps: about a minute on 2 CPU cores
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optax

import jaxrl
from jaxrl.bridge import (
    LocalServer,
    ParamsSource,
    ServerOptions,
    SharedMemoryPublisher,
    VllmServer,
    headers,
)
from jaxrl.losses import grpo
from jaxrl.sampling import VllmSampler

STEPS = 8
directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
examples = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
base = jaxrl.load(directory / "sft/model")
precision, recipe = jaxrl.Precision.parse("fp32"), grpo()
learner = jaxrl.make_learner(
    base.model, recipe.objective, optimizer=optax.adamw(2e-4), precision=precision
)
step, state = jaxrl.jit(learner.step, donate_argnums=0), learner.init(base.params)
options = ServerOptions(
    python=Path(".venv-vllm/bin/python").absolute(), dtype=precision.sampler.name, max_model_len=64
)


def reward(completion: str, example: dict) -> float:
    return float(completion.split()[-1:] == [example["answer"]])


with LocalServer(directory / "sft/model", options, log=directory / "vllm.log") as server:
    server.wait(lambda seconds: None)
    sizes = base.model.config
    sampler = VllmSampler(
        [server.url],
        max_positions=sizes.max_positions,
        vocab_size=sizes.vocab_size,
        headers=headers(server.api_key),
    )

    def sample(i: int) -> list:
        return jaxrl.rollouts(
            sampler,
            examples[32 * i : 32 * (i + 1)],
            tokenizer=base.tokenizer,
            reward=reward,
            params=jaxrl.SamplingParams(max_tokens=36, stop=base.stop, seed=i),
            group_size=8,
        )

    with (
        SharedMemoryPublisher(
            [VllmServer(server.url, api_key=server.api_key)],
            wire=precision.wire,
            sampler=precision.sampler,
        ) as publisher,
        ThreadPoolExecutor(1) as background,
    ):

        def publish(version: int) -> None:
            source = ParamsSource(state.params, base.model.specs, dtype=precision.wire)
            publisher.publish(source, version=version)
            sampler.use_version(version, urls=[server.url])

        publish(0)
        ahead = background.submit(sample, 0)
        for i in range(STEPS):
            rollouts = ahead.result()
            if i + 1 < STEPS:
                ahead = background.submit(sample, i + 1)  # while the learner makes version i + 1
            batch = jaxrl.minibatch(rollouts, recipe.advantages, row_length=48)
            state, metrics = step(state, batch)
            publish(i + 1)
            oldest = min(int(r.version.min()) for r in rollouts)
            score = sum(r.reward for r in rollouts) / len(rollouts)
            print(f"step {i + 1}: reward {score:.3f}, sampled from version {oldest} on")
    sampler.close()
