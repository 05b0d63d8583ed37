"""Completes each prompt of data.eval_path and prints the accuracy by the first
reward, with its 95 % confidence interval. Completions are greedy, or sampled with --samples N,
which adds pass@k and the accuracy of the majority's answer. It accepts the keys and the config file
of `jaxrl train`, and samples in this process or on servers, as [sampler] says. If the config names
an environment, it plays episodes; without reward.path the environment's reward counts.

With --keep it measures all of data.path. The rows with a pass rate (mean reward) between two bounds
go to --out, unchanged except for a new column, pass_rate. OUT.measured stores all rewards: rerun
the same command to resume after an interruption, or change the bounds without sampling again.

  jaxrl eval runs/latest/config.toml --model.path runs/latest/model
  jaxrl eval mine.toml --samples 8 --by level --json scores.json
  jaxrl eval mine.toml --samples 40 --keep 0.2:0.8 --out solved_sometimes.jsonl"""

import argparse
import functools
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.commands import options
from jaxrl.commands.eval import pass_rates, scores
from jaxrl.commands.eval.pass_rates import Bounds
from jaxrl.commands.eval.source import DataSet, load_data, open_source
from jaxrl.commands.paths import find_inputs
from jaxrl.config.training import Config
from jaxrl.huggingface import Checkpoint
from jaxrl.tracking.display import ProgressDisplay
from jaxrl.training.evaluate import Evaluation, evaluate


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser_with_file("eval", Config, description=__doc__)
    made.add_argument(
        "--samples", type=int, metavar="N", help="sample N completions per prompt (default: greedy)"
    )
    made.add_argument(
        "--data", nargs="+", metavar="PATH", help="data sets to measure, in place of the config's"
    )
    made.add_argument("--by", metavar="COLUMN", help="also print the accuracy by this column")
    made.add_argument("--json", type=options.output, help="write the numbers to this file")
    made.add_argument(
        "--completions", type=options.output, help="write the completions to this .jsonl file"
    )
    made.add_argument(
        "--keep", metavar="LOW:HIGH", help="write the rows with a pass rate between these to --out"
    )
    made.add_argument("--out", type=options.output, help="the .jsonl file of --keep")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, given = options.parse_arguments(parser(), Config, argv)
    _check(config, given)
    bounds = None if given.keep is None else pass_rates.read_bounds(given.keep)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that servers stop
    config = find_inputs(config)
    default = config.data.eval_path if bounds is None else config.data.path
    if given.data is None and default is None:
        raise ValueError("data.eval_path is missing: name a file of held-out prompts")
    paths, checkpoint = given.data or [default], Checkpoint(config.model.path)
    sets = [load_data(config, checkpoint, path=p, held_out=bounds is None) for p in paths]
    found = _measure(sets, given) if bounds is None else _keep(sets[0], given, bounds)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _check(config: Config, given: argparse.Namespace) -> None:
    keeps, sets = given.keep is not None, len(given.data or ())
    problems = {
        f"--samples {given.samples}: expected 1 or more": (given.samples or 1) < 1,
        "reward.path is missing: name a function that scores completions": (
            not config.reward.path and config.environment.name is None
        ),
        "--keep LOW:HIGH and --out FILE go together: give both or neither": (
            keeps != (given.out is not None)
        ),
        "--keep needs --samples N, completions of each prompt": keeps and given.samples is None,
        "--keep stores rewards alone; leave out --completions": keeps and given.completions,
        f"--keep takes one data set, but --data names {sets}": keeps and sets > 1,
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(problem)


def _measure(sets: Sequence[DataSet], given: argparse.Namespace) -> dict[str, Any]:
    """Measures data sets; returns their numbers by path."""
    found, rows, samples = dict[str, Any](), list[dict[str, Any]](), given.samples or 1
    note = functools.partial(print, file=sys.stderr, flush=True)
    most = max(len(one.prompts.examples) for one in sets)
    with open_source(sets[0], prompts=most, samples=samples, note=note) as source:
        params = source.greedy if given.samples is None else source.params
        for one in sets:
            examples = one.prompts.examples
            measured = evaluate(source, examples, params=params, samples=samples).checked()
            for remark in filter(None, (measured.failure, measured.no_share)):
                note(remark)
            found[one.path] = scores.summarize(measured.rewards, examples, by=given.by)
            found[one.path] |= scores.further(measured)
            rows += _rows(one, measured)
            _print(one, found[one.path], named=len(sets) > 1)
    if given.completions is not None:
        lines = (json.dumps(row, default=str) + "\n" for row in rows)
        given.completions.write_text("".join(lines), encoding="utf-8")
    return found


def _print(data: DataSet, found: dict[str, Any], *, named: bool) -> None:
    prompts = data.prompts
    skipped = f"{len(prompts.examples)} prompts, {prompts.too_long} too long and skipped"
    print(f"{data.path}: {skipped}" if named else skipped)
    for line in scores.lines(found):
        print(line)


def _keep(data: DataSet, given: argparse.Namespace, bounds: Bounds) -> dict[str, Any]:
    """Measures a data set and writes the rows within the bounds; returns its numbers by path."""
    examples, samples = data.prompts.examples, given.samples
    journal = pass_rates.Journal(
        given.out.with_name(given.out.name + ".measured"),
        fingerprint=pass_rates.fingerprint(data.config, examples, samples=samples),
        chunk=data.config.train.train_batch,
        total=len(examples),
    )
    done, total = len(journal.measured), len(examples)
    with ProgressDisplay("eval", start_step=done, total_steps=total) as progress:
        opening = functools.partial(
            open_source, data, prompts=journal.chunk, samples=samples, note=progress.note
        )
        try:
            for failure in pass_rates.measure(opening, examples, journal=journal, samples=samples):
                if failure is not None:
                    progress.note(failure)
                rates = [one.pass_rate for one in journal.measured]
                kept = sum(pass_rates.is_within(rate, bounds) for rate in rates)
                numbers = {"accuracy": float(np.mean([r or 0.0 for r in rates])), "kept": kept}
                progress.update(len(journal.measured), numbers)
        except KeyboardInterrupt:
            measured = f"{len(journal.measured)} of {total} prompts measured"
            progress.note(f"{measured}; rerun the same command to resume")
            raise
    pass_rates.write_kept(given.out, examples, journal.measured, bounds=bounds)
    rewards = np.array([one.rewards for one in journal.measured], np.float64)
    found = scores.summarize(rewards, examples, by=given.by)
    _print(data, found, named=False)
    for line in pass_rates.lines(journal.measured, bounds):
        print(line)
    print(f"rows: {given.out}")
    return {data.path: found}


def _rows(data: DataSet, measured: Evaluation) -> list[dict[str, Any]]:
    """Returns a row for each completion: the data's row, the completion and its reward."""
    task, samples = data.task, measured.rewards.shape[1]
    name = task.rewards[0].name if task.rewards else "reward"
    rows = [
        {**data.prompts.examples[i // samples], "completion": text, name: value}
        for i, (text, value) in enumerate(
            zip(measured.completions, measured.rewards.ravel().tolist(), strict=True)
        )
    ]
    for row, rollout in zip(rows, measured.rollouts, strict=True):
        if rollout.episode is not None:
            row["episode"] = task.tokenizer.decode(rollout.completion, skip_special_tokens=False)
    return rows
