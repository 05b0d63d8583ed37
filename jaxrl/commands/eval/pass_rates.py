"""Pass rates of prompts, kept in a journal, and the selection of prompts by them.

A working trainer reaches full training accuracy on prompts that the model already solves sometimes.
A curve that stays below or falls points to a fault in the trainer (the sanity test of
arXiv:2510.26788).
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.config.training import Config
from jaxrl.core import write_whole
from jaxrl.data import Example
from jaxrl.training import inputs
from jaxrl.training.evaluate import evaluate
from jaxrl.training.rollouts.generate import RolloutSource

COLUMN = "pass_rate"

Bounds = tuple[float, float]
"""Lowest and highest pass rate to keep."""


def read_bounds(text: str) -> Bounds:
    """Reads LOW:HIGH; raises ValueError for other texts and impossible bounds."""
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not low <= high:
        raise ValueError(f"--keep {text}: expected LOW:HIGH with LOW <= HIGH, such as 0.2:0.8")
    return low, high


def is_within(pass_rate: float | None, bounds: Bounds) -> bool:
    """Tells if a pass rate is known and lies within bounds."""
    (low, high), rounding = bounds, 1e-9
    return pass_rate is not None and low - rounding <= pass_rate <= high + rounding


class Measured(NamedTuple):
    """The outcome of one prompt."""

    rewards: list[float | None]  # of its completions; None where the reward failed
    truncated: int  # completions that reached the limit of tokens

    @property
    def pass_rate(self) -> float | None:
        """The mean reward, with 0 for a failure; None if all failed, so that the row is dropped."""
        if all(reward is None for reward in self.rewards):
            return None
        return float(np.mean([reward or 0.0 for reward in self.rewards]))


class Journal:
    """A file with a JSON line for each measured prompt, safe against interruption at any moment."""

    def __init__(self, path: Path, *, fingerprint: Mapping[str, str], chunk: int, total: int):
        """Opens or creates the file for `total` prompts and drops an incomplete chunk.

        Raises:
          ValueError: if the file has another fingerprint; the message names the keys that differ.
            Also for a damaged line, which it names.
        """
        self._path, self.chunk = path, chunk
        header = json.dumps({"fingerprint": fingerprint})
        # Anything after the last line feed is an unfinished line.
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        found = text.split("\n")[:-1]
        if found and found[0] != header:
            raise ValueError(
                f"{path} was measured with another {_difference(found[0], fingerprint)}; delete it "
                "or choose another --out"
            )
        lines = found[1:]
        whole = len(lines) if len(lines) == total else len(lines) // chunk * chunk
        self.measured = [
            _measured(line, where=f"{path}:{number}")
            for number, line in enumerate(lines[:whole], start=2)
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in [header, *lines[:whole]]))

    def add(self, chunk: Sequence[Measured]) -> None:
        """Appends the next chunk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(one._asdict())}\n" for one in chunk))
            file.flush()
            os.fsync(file.fileno())
        self.measured.extend(chunk)


def _measured(line: str, *, where: str) -> Measured:
    try:
        found = Measured(**json.loads(line))
        if not (isinstance(found.rewards, list) and isinstance(found.truncated, int)):
            raise ValueError("a field has another type")
        return found
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: not the outcome of a prompt: {error}; delete the file to measure again, or "
            "choose another --out"
        ) from None


def fingerprint(config: Config, examples: Sequence[Example], *, samples: int) -> dict[str, str]:
    """Digests everything that the pass rates depend on, by the key that sets it."""
    model = inputs.directory_input("model", "model.path", config.model.path)
    sampling = config.sampling.model_dump(exclude={"max_batch"})
    values = {
        "model.path": inputs.read_input(model).digests,
        "data.path": inputs.rows_digest(examples),
        "reward.path": config.reward.path[:1],
        "environment": config.environment.model_dump(),
        **{f"sampling.{name}": value for name, value in sampling.items()},
        "precision": config.precision.text,
        "sampler.name": config.sampler.name,
        "seed": config.seed,
        "--samples": samples,
        "train.train_batch": config.train.train_batch,
    }
    return {name: inputs.digest(value) for name, value in values.items()}


def _difference(header: str, fingerprint: Mapping[str, str]) -> str:
    """Names the keys in which the first line of a journal differs from a fingerprint."""
    try:
        there = dict(json.loads(header)["fingerprint"])
    except (KeyError, TypeError, ValueError):  # damaged
        there = {}
    changed = [name for name, digest in fingerprint.items() if there.get(name) != digest]
    return ", ".join(changed)


def measure(
    opening: Callable[[], AbstractContextManager[RolloutSource]],
    examples: Sequence[Example],
    *,
    journal: Journal,
    samples: int,
) -> Iterator[str | None]:
    """Samples and scores `samples` completions of each prompt that the journal lacks, and adds them
    to it in chunks. Yields for each chunk a line about its failures, or None. Opens the source only
    if it is needed.

    Every chunk has its own seed, so a resumed measurement equals an uninterrupted one.

    Raises:
      RuntimeError: if every completion of the first chunk fails to be scored.
    """
    done = len(journal.measured)
    if done == len(examples):
        return
    with opening() as source:
        for start in range(done, len(examples), journal.chunk):
            seed = np.random.SeedSequence((source.params.seed, start)).generate_state(1)[0]
            params = dataclasses.replace(source.params, seed=int(seed))
            some = examples[start : start + journal.chunk]
            found = evaluate(source, some, params=params, samples=samples)
            if start == done:
                found = found.checked()
            pairs = zip(found.rewards.tolist(), found.truncated, strict=True)
            journal.add(
                [
                    Measured([None if math.isnan(x) else x for x in rewards], int(truncated.sum()))
                    for rewards, truncated in pairs
                ]
            )
            yield found.failure


def write_kept(
    path: Path, examples: Sequence[Example], measured: Sequence[Measured], *, bounds: Bounds
) -> None:
    """Writes rows with a pass rate within bounds as JSON lines, with the column `pass_rate`."""
    kept = [
        {**example.row, COLUMN: one.pass_rate}
        for example, one in zip(examples, measured, strict=True)
        if is_within(one.pass_rate, bounds)
    ]
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in kept)
    write_whole(path, "".join(lines))


def lines(measured: Sequence[Measured], bounds: Bounds) -> Iterator[str]:
    """Formats counts of completions, and of kept and dropped prompts."""
    known = [one.pass_rate for one in measured if one.pass_rate is not None]
    dropped = [pass_rate for pass_rate in known if not is_within(pass_rate, bounds)]
    low, high = bounds
    yield (
        f"of {sum(len(one.rewards) for one in measured)} completions, "
        f"{sum(one.truncated for one in measured)} were truncated at sampling.max_tokens; the "
        f"reward failed on {sum(one.rewards.count(None) for one in measured)}"
    )
    yield (
        f"kept {len(known) - len(dropped)}; dropped {sum(a < low for a in dropped)} below {low:g}, "
        f"{sum(a > high for a in dropped)} above {high:g}, {len(measured) - len(known)} without a "
        "reward"
    )
