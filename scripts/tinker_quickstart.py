"""Trains the quickstart's model through the Tinker API, with the loop of the cookbook's rl_loop.

    jaxrl tinker runs/quickstart/sft/model --precision fp32    # prints two exports
    python scripts/tinker_quickstart.py runs/quickstart

The second command reads the two variables, and needs the package tinker alone. It prints the share
of right answers while it trains, and greedy held-out accuracy before and after, as JSON lines.
"""

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import tinker
from tinker import types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="with train.jsonl and held_out.jsonl")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    args = parser.parse_args()
    train, held_out = (
        [json.loads(line) for line in (args.directory / f"{name}.jsonl").open()]
        for name in ("train", "held_out")
    )
    with tinker.ServiceClient() as service:
        model = service.get_server_capabilities().supported_models[0].model_name
        client = service.create_lora_training_client(model, rank=args.rank, seed=0).result()
        tokenizer = client.get_tokenizer()
        adam = types.AdamParams(learning_rate=args.learning_rate, eps=1e-8)
        rng = random.Random(0)
        for step in range(args.steps + 1):
            sampler = client.save_weights_and_get_sampling_client().result()
            if step in (0, args.steps):
                share = accuracy(sampler, tokenizer, held_out)
                print(json.dumps({"step": step, "held_out": share}), flush=True)
            if step < args.steps:
                rewards, data = played(sampler, tokenizer, rng.sample(train, 32), seed=step)
                if data:  # all groups may be right
                    computed = client.forward_backward(data, "importance_sampling")
                    client.optim_step(adam).result()
                    computed.result()  # raises if it was refused
                shown = {"step": step, "reward": sum(rewards) / len(rewards)}
                print(json.dumps(shown), flush=True)


def prompt_of(tokenizer: Any, row: dict[str, Any]) -> types.ModelInput:
    """Renders a row as the model reads it."""
    messages = [{"role": "user", "content": row["prompt"]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return types.ModelInput.from_ints(tokenizer.encode(text, add_special_tokens=False))


def reward_of(tokenizer: Any, tokens: list[int], row: dict[str, Any]) -> float:
    """Returns 1 if the last number of a completion is the answer."""
    numbers = re.findall(r"\d+", tokenizer.decode(tokens, skip_special_tokens=True))
    return float(numbers[-1:] == [row["answer"]])


def sampled(
    sampler: tinker.SamplingClient,
    prompts: list[types.ModelInput],
    *,
    count: int,
    temperature: float,
    seed: int,
) -> list[list[types.SampledSequence]]:
    """Draws completions of all prompts at once."""
    waiting = [
        sampler.sample(
            prompt,
            num_samples=count,
            sampling_params=types.SamplingParams(
                max_tokens=36, temperature=temperature, seed=1000 * seed + i
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
    return [one.result().sequences for one in waiting]


def accuracy(sampler: tinker.SamplingClient, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """Measures the share of right greedy answers."""
    prompts = [prompt_of(tokenizer, row) for row in rows]
    found = sampled(sampler, prompts, count=1, temperature=0.0, seed=0)
    right = [
        reward_of(tokenizer, said[0].tokens, row) for said, row in zip(found, rows, strict=True)
    ]
    return sum(right) / len(right)


def played(
    sampler: tinker.SamplingClient, tokenizer: Any, rows: list[dict[str, Any]], *, seed: int
) -> tuple[list[float], list[types.Datum]]:
    """Samples a group for each row; returns all rewards, and the data of the groups that differ."""
    prompts = [prompt_of(tokenizer, row) for row in rows]
    groups = sampled(sampler, prompts, count=8, temperature=1.0, seed=seed)
    rewards, data = [], []
    for prompt, row, group in zip(prompts, rows, groups, strict=True):
        scores = [reward_of(tokenizer, one.tokens, row) for one in group]
        mean = sum(scores) / len(scores)
        rewards += scores
        for one, score in zip(group, scores, strict=True):
            if score != mean:
                data.append(datum_of(prompt, one, advantage=score - mean))
    return rewards, data


def datum_of(
    prompt: types.ModelInput, one: types.SampledSequence, *, advantage: float
) -> types.Datum:
    """Makes a datum of a completion."""
    before, size = prompt.length - 1, len(one.tokens)
    assert one.logprobs is not None
    return types.Datum(
        model_input=prompt.append(types.EncodedTextChunk(tokens=one.tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": [0] * before + one.tokens,
            "logprobs": [0.0] * before + one.logprobs,
            "advantages": [0.0] * before + [advantage] * size,
        },
    )


if __name__ == "__main__":
    main()
