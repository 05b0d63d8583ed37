"""Filters prompts by pass rate: samples completions for every prompt in data.path and
keeps the rows whose mean first reward lies in [low, high]. It accepts the keys, and so the
config file, of `jaxrl train`. Kept rows are unchanged except for a new column, pass_rate.
OUT.measured stores all pass rates: rerun the same command to resume after an interruption, or
change the bounds without sampling again.

  jaxrl filter configs/quickstart.toml --out solved_sometimes.jsonl --samples 40"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.builders.layout import divide_cpu, make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.prompts import load_prompts, sampling_params
from jaxrl.builders.sampler import SamplerNeeds, open_sampler
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.commands import options
from jaxrl.commands.filter import pass_rate
from jaxrl.commands.paths import find_inputs
from jaxrl.config.training import Config
from jaxrl.data import Example, Tokenizer, read_rows
from jaxrl.environments import load_rewards
from jaxrl.huggingface import Checkpoint
from jaxrl.tracking.display import ProgressDisplay


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser_with_file("filter", Config, description=__doc__)
    made.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    made.add_argument(
        "--samples", type=int, default=40, help="completions for each prompt (default: 40)"
    )
    made.add_argument("--low", type=float, default=0.2, help="lowest pass rate (default: 0.2)")
    made.add_argument("--high", type=float, default=0.8, help="highest pass rate (default: 0.8)")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, arguments = options.parse(parser(), Config, argv)
    if not 0 <= arguments.low <= arguments.high <= 1 or arguments.samples < 1:
        raise ValueError(
            f"--low {arguments.low} --high {arguments.high} --samples {arguments.samples}: "
            "expected 0 <= low <= high <= 1 and at least 1 sample"
        )
    if config.environment.name is not None:
        raise ValueError(
            f"environment.name = {config.environment.name!r}: jaxrl filter supports single-turn "
            "prompts only; leave out the table [environment]"
        )
    if not config.reward.path:
        raise ValueError("reward.path is missing: name a function that scores completions")
    return _filter(find_inputs(config), arguments)


def _filter(config: Config, arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    out, samples, low, high = arguments.out, arguments.samples, arguments.low, arguments.high
    tokenizer = Checkpoint(config.model.path).tokenizer
    prompts = load_prompts(config.data, tokenizer, rows=read_rows(config.data.path))
    examples = prompts.examples
    journal = pass_rate.Journal(
        out.with_name(out.name + ".measured"),
        fingerprint=pass_rate.fingerprint(config, examples, samples=samples),
        chunk=config.train.train_batch,
        total=len(examples),
    )
    try:
        _measure(config, arguments, journal=journal, tokenizer=tokenizer, examples=examples)
    except KeyboardInterrupt:
        done = f"{len(journal.measured)} of {len(examples)} prompts measured"
        print(f"{done}; rerun the same command to resume", file=sys.stderr)
        raise
    measured = journal.measured
    kept = pass_rate.write_kept(out, examples, measured, low=low, high=high)
    known = [m.pass_rate for m in measured if m.pass_rate is not None]
    others = [m.pass_rate for m in measured if m.pass_rate is not None and not m.within(low, high)]
    truncated, failed = sum(m.truncated for m in measured), sum(m.failed for m in measured)
    print(
        f"{len(examples)} prompts ({prompts.too_long} more too long), {samples} completions each: "
        f"mean pass rate {100 * np.mean(known):.1f} %\n"
        f"of {samples * len(examples)} completions, {truncated} were truncated at "
        f"sampling.max_tokens; the reward failed on {failed}\n"
        f"kept {kept}; dropped {sum(a < low for a in others)} below {low:g}, "
        f"{sum(a > high for a in others)} above {high:g}, {len(measured) - len(known)} without a "
        f"reward\n"
        f"rows: {out}"
    )
    return 0


def _measure(
    config: Config,
    arguments: argparse.Namespace,
    *,
    journal: pass_rate.Journal,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
) -> None:
    """Measures the prompts that are missing from the journal."""
    done = len(journal.measured)
    if done == len(examples):
        return
    precision, checkpoint = config.precision, Checkpoint(config.model.path)
    divide_cpu(config)
    layout = make_layout(config.mesh, precision=config.precision, reserved=config.sampler.devices)
    reward, *_ = load_rewards(
        config.reward.path, config.reward.function_weights, timeout=config.reward.timeout
    )
    model, params = load_model(checkpoint, layout=layout, dtype=precision.params)
    with (
        ProgressDisplay("filter", start_step=done, total_steps=len(examples)) as progress,
        open_sampler(
            config.sampler,
            WeightRoute(model, params, 0, precision, checkpoint),
            layout=layout,
            directory=arguments.out.parent,
            note=progress.note,
            needs=SamplerNeeds(
                config.longest_sequence,
                config.sampling.max_batch,
                completions=min(config.sampler.max_requests, config.train.train_batch)
                * arguments.samples,
            ),
        ) as serving,
    ):
        for measured, failure in pass_rate.measure(
            serving.sampler,
            examples,
            journal=journal,
            samples=arguments.samples,
            sampling=sampling_params(config.sampling, checkpoint, seed=config.seed),
            reward=reward,
            tokenizer=tokenizer,
        ):
            journal.add(measured)
            if failure is not None:
                progress.note(failure)
            known = [m.pass_rate for m in journal.measured if m.pass_rate is not None]
            kept = sum(m.within(arguments.low, arguments.high) for m in journal.measured)
            numbers = {"accuracy": float(np.mean(known)), "kept": kept}
            progress.update(len(journal.measured), numbers)
