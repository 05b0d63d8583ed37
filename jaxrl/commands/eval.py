"""`jaxrl eval`: measures accuracy on held-out prompts."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxrl.builders import environment
from jaxrl.builders.layout import divide_cpu, make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.prompts import sampling_params
from jaxrl.builders.task import load_task
from jaxrl.commands import options
from jaxrl.config.sampler import SamplerConfig
from jaxrl.config.training import Config

DESCRIPTION = """Samples one greedy completion for each prompt in data.eval_path and prints their
accuracy by the first reward. It accepts the keys, and so the config file, of `jaxrl train`.

  jaxrl eval runs/latest/config.toml --model.path runs/latest/model"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = options.parser_with_file("eval", Config, description=DESCRIPTION)
    made.add_argument("--completions", type=Path, help="write the completions to this .jsonl file")
    config, arguments = options.parse(made, Config, argv)
    if config.data.eval_path is None:
        raise ValueError("data.eval_path is missing: name a file of held-out prompts")

    from jaxrl.sampling.embedded.sampler import EmbeddedSampler
    from jaxrl.training.evaluate import evaluate_greedily
    from jaxrl.training.rollouts.generate import RolloutSource

    policy = config.policy
    divide_cpu(config)
    layout = make_layout(config.mesh, policy=config.policy, reserved=config.sampler.devices)
    task = load_task(config, splits=("test",))
    rewards, prompts, tokenizer = task.rewards, task.held_out, task.tokenizer
    assert prompts is not None
    model, weights = load_model(config.model.path, layout=layout, dtype=policy.params)
    sampler = EmbeddedSampler(
        model,
        weights,
        precision=policy,
        max_batch=config.sampling.max_batch,
        layout=layout if layout.mesh.size > 1 else None,
    )
    # This command samples in its own process even if the config names servers.
    here = config.model_copy(update={"sampler": SamplerConfig()})
    episode_runner = environment.make_episode_runner(
        here, tokenizer, task.tools, vocab_size=model.config.vocab_size
    )
    params = sampling_params(config.sampling, config.model.path, tokenizer, seed=config.seed)
    result = evaluate_greedily(
        RolloutSource(here, task, sampler, params, episode_runner, reward_model=None, note=print)
    )
    if arguments.completions is not None:
        name = rewards[0].name if rewards else "reward"
        rows = [
            {**example.record, "completion": text, name: value}
            for example, text, value in zip(
                prompts.examples, result.completions, result.rewards.tolist(), strict=True
            )
        ]
        if episode_runner is not None:
            for row, episode in zip(rows, result.episodes, strict=True):
                row["episode"] = tokenizer.decode(episode.completion, skip_special_tokens=False)
        lines = (json.dumps(row, default=str) + "\n" for row in rows)
        arguments.completions.write_text("".join(lines), encoding="utf-8")
    print(f"{len(prompts.examples)} prompts, {prompts.too_long} too long and skipped")
    for number, value in result.numbers.items():
        print(f"{number}: {value:.3g}")
    print(f"held-out accuracy: {result.accuracy:.1%}".replace("%", " %"))
    return 0
