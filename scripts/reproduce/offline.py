"""Comparison of learner and vLLM on equal weights and tokens, in bf16 and fp16."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from experiments.runs import CONFIGS, config, markdown
from reproduce import scoring

from jaxrl.core import Rollout
from jaxrl.environments import as_rollout
from jaxrl.training.run import open_run

TOKENS = 192  # of a completion; sampled past its end to study long sequences
LENGTHS = (8, 16, 32, 64, 128, TOKENS)
SERVED = {"bf16": "bf16_master", "fp16": "fp16_master"}
LEARNERS = {**SERVED, "f32": "fp32"}
Scores = dict[str, np.ndarray]  # "learner bf16", "vllm bf16", ...: f64[sequences, TOKENS]


def measured(directory: Path, keys: Mapping[str, object]) -> Scores:
    """Scores 64 sequences of the embedded sampler in f32, with learners in three dtypes and vLLM
    servers in two, and keeps the scores in `directory`. `keys` contain "model.path" and
    "data.path"."""
    file = directory / "scores.npz"
    if file.exists():
        return dict(np.load(file))
    more = {"sampling.max_tokens": TOKENS, "data.max_prompt_tokens": 16}
    more |= {"train.row_length": 208, "train.microbatch_tokens": 16 * 208}
    more |= {"train.train_batch": 8, **keys}
    found: Scores = {}
    rollouts: list[Rollout] = []
    for dtype in ("f32", "bf16", "fp16"):
        sampler = {"sampler.name": "vllm"} if dtype in SERVED else {}
        own = {"precision": LEARNERS[dtype], "run_dir": directory / dtype, **sampler}
        with open_run(config(CONFIGS / "sanity_test.toml", more | own)) as (run, state, _):
            rollouts = rollouts or _sequences(run)
            batch = scoring.minibatch(run, rollouts)
            found[f"learner {dtype}"] = _answers(scoring.score(run, state.policy, batch).learner)
            if dtype in SERVED:
                sampled: Any = run.source.sampler
                served = sampled.score([np.concatenate([r.prompt, r.completion]) for r in rollouts])
                tails = [scores[-TOKENS:] for scores in served]
                found[f"vllm {dtype}"] = np.array(tails, np.float64)
    np.savez(file, **found)
    return found


def _sequences(run: Any) -> list[Rollout]:
    prompts = [example.tokens for example in run.source.task.prompts.examples[:8]]
    endless = dataclasses.replace(run.source.params, stop=())
    drawn = sorted(
        run.source.sampler.sample(prompts, endless, group_size=8),
        key=lambda c: (c.prompt_index, c.sample_index),
    )
    return [
        as_rollout(c, prompts[c.prompt_index], group=c.prompt_index)._replace(reward=0.0)
        for c in drawn
    ]


def _answers(scores: np.ndarray) -> np.ndarray:
    """Removes NaN outside of the completions: [N, row] -> [N, TOKENS]."""
    return scores[~np.isnan(scores)].reshape(len(scores), TOKENS)


def table(scores: Scores) -> str:
    """Formats a line for each learner and server, and the ratio of bf16's to fp16's numbers."""
    header = ["learner", "vLLM", "token std", "p99", "mean of abs(p - q)", "beyond eps .2"]
    header += [f"sequence std, {length} tokens" for length in LENGTHS]
    numbers = {}
    for learner, served in (*((d, d) for d in SERVED), *(("f32", d) for d in SERVED)):
        trained, sampled = scores[f"learner {learner}"], scores[f"vllm {served}"]
        delta = trained - sampled
        outside = (delta > np.log(1.2)) | (delta < np.log(0.8))
        p99 = np.quantile(np.abs(delta), 0.99)
        gap = np.abs(np.exp(trained) - np.exp(sampled)).mean()
        by_length = [delta[:, :length].sum(axis=1).std() for length in LENGTHS]
        numbers[learner, served] = [delta.std(), p99, gap, outside.mean(), *by_length]
    lines = [[*pair, *(f"{x:.2g}" for x in row)] for pair, row in numbers.items()]
    times = [
        f"{a / b:.1f}" if b else "-"
        for a, b in zip(numbers["bf16", "bf16"], numbers["fp16", "fp16"], strict=True)
    ]
    lines.append(["**bf16 / fp16**", "", *times])
    return markdown([dict(zip(header, line, strict=True)) for line in lines])
