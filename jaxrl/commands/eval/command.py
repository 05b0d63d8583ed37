"""Completes each prompt of data.eval_path and prints the accuracy by the first
reward, with its 95 % confidence interval. Completions are greedy, or sampled with --samples N,
which adds pass@k and the accuracy of the majority's answer. It accepts the keys, and so the config
file, of `jaxrl train`.

  jaxrl eval runs/latest/config.toml --model.path runs/latest/model
  jaxrl eval mine.toml --samples 8 --by level --json scores.json"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.builders import environment
from jaxrl.builders.layout import divide_cpu, make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.prompts import sampling_params
from jaxrl.builders.task import load_task
from jaxrl.commands import options
from jaxrl.commands.eval import scores
from jaxrl.commands.paths import find_inputs
from jaxrl.config.sampler import SamplerConfig
from jaxrl.config.training import Config
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import EmbeddedSampler
from jaxrl.training.evaluate import Evaluation, evaluate, evaluate_greedily
from jaxrl.training.rollouts.generate import RolloutSource


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser_with_file("eval", Config, description=__doc__)
    made.add_argument(
        "--samples", type=int, metavar="N", help="sample N completions per prompt (default: greedy)"
    )
    made.add_argument(
        "--data", nargs="+", metavar="PATH", help="held-out data sets, in place of data.eval_path"
    )
    made.add_argument("--by", metavar="COLUMN", help="also print the accuracy by this column")
    made.add_argument("--json", type=Path, help="write the numbers to this file")
    made.add_argument("--completions", type=Path, help="write the completions to this .jsonl file")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, given = options.parse(parser(), Config, argv)
    paths: list[str] = given.data or [p for p in [config.data.eval_path] if p is not None]
    if not paths:
        raise ValueError("data.eval_path is missing: name a file of held-out prompts")
    if given.samples is not None and given.samples < 1:
        raise ValueError(f"--samples {given.samples}: expected 1 or more")
    config = find_inputs(config)

    found, rows = dict[str, Any](), list[dict[str, Any]]()
    for path, source in zip(paths, _sources(config, paths), strict=True):
        if given.samples is None:
            measured = evaluate_greedily(source)
        else:
            measured = evaluate(source, source.params, samples=given.samples)
        prompts = source.task.held_out
        assert prompts is not None
        found[path] = scores.summarize(measured, prompts.examples, by=given.by)
        rows += _rows(source, measured)
        skipped = f"{len(prompts.examples)} prompts, {prompts.too_long} too long and skipped"
        print(f"{path}: {skipped}" if len(paths) > 1 else skipped)
        for line in scores.lines(found[path]):
            print(line)
    if given.completions is not None:
        lines = (json.dumps(row, default=str) + "\n" for row in rows)
        given.completions.write_text("".join(lines), encoding="utf-8")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _sources(config: Config, paths: Sequence[str]) -> list[RolloutSource]:
    """Loads the model once, and the task of each data set."""
    # This command samples in its own process even if the config names servers.
    here = config.model_copy(update={"sampler": SamplerConfig()})
    data = (config.data.model_copy(update={"eval_path": path}) for path in paths)
    configs = [here.model_copy(update={"data": one}) for one in data]
    checkpoint = Checkpoint(config.model.path)
    tasks = [load_task(one, checkpoint, splits=("test",)) for one in configs]  # errors come first
    divide_cpu(config)
    layout = make_layout(config.mesh, precision=config.precision, reserved=config.sampler.devices)
    model, weights = load_model(checkpoint, layout=layout, dtype=config.precision.params)
    sampler = EmbeddedSampler(
        model,
        weights,
        precision=config.precision,
        max_batch=config.sampling.max_batch,
        layout=layout if layout.mesh.size > 1 else None,
    )
    return [
        RolloutSource(
            one,
            task,
            sampler,
            sampling_params(config.sampling, checkpoint, seed=config.seed),
            environment.make_episode_runner(
                one, task.tokenizer, task.tools, vocab_size=model.config.vocab_size
            ),
            reward_model=None,
            teacher=None,
            note=print,
        )
        for one, task in zip(configs, tasks, strict=True)
    ]


def _rows(source: RolloutSource, measured: Evaluation) -> list[dict[str, Any]]:
    """Returns a row for each completion: that of the data, the completion and its reward."""
    task, samples = source.task, measured.rewards.shape[1]
    assert task.held_out is not None
    name = task.rewards[0].name if task.rewards else "reward"
    rows = [
        {**task.held_out.examples[i // samples].record, "completion": text, name: value}
        for i, (text, value) in enumerate(
            zip(measured.completions, measured.rewards.ravel().tolist(), strict=True)
        )
    ]
    for row, episode in zip(rows, measured.episodes, strict=bool(measured.episodes)):
        row["episode"] = task.tokenizer.decode(episode.completion, skip_special_tokens=False)
    return rows
