"""Perfectible data: prompts that a model answers right sometimes, neither always nor never.

On such prompts alone a trainer that works must reach full training accuracy, so that a curve which
stays below or falls shows a fault of the trainer (the sanity test of arXiv:2510.26788).
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.config.training import Config
from jaxrl.core.files import write_whole
from jaxrl.data.prompts import Example, Tokenizer
from jaxrl.environments.rewards import scoring
from jaxrl.environments.rewards.scoring import Reward
from jaxrl.sampling.base import Sampler, SamplingParams

COLUMN = "base_accuracy"


class Measured(NamedTuple):
    """What the answers to one prompt were worth.

    Attributes:
      accuracy: mean of the reward over the answers that it could score; None if it failed on all.
      failed: answers on which the reward failed.
      truncated: answers that max_tokens cut.
    """

    accuracy: float | None
    failed: int
    truncated: int

    def within(self, low: float, high: float) -> bool:
        """Whether the prompt is kept; both bounds belong to the range."""
        rounding = 1e-9
        return self.accuracy is not None and low - rounding <= self.accuracy <= high + rounding


class Lot(NamedTuple):
    """Measures of some prompts, in their order, and how the reward first failed, if it did."""

    measured: list[Measured]
    first_failure: str | None


class Journal:
    """Measures of the first prompts, in their order, a JSON line each, in a file that survives an
    interruption at any moment."""

    def __init__(self, path: Path, *, fingerprint: str, lot: int, total: int):
        """Opens the file, or makes it.

        Args:
          path: the file.
          fingerprint: of everything that a measure depends on.
          lot: prompts that are measured at a time; an unfinished lot is dropped.
          total: prompts in all.

        Raises:
          ValueError: if the file holds measures of something else.
        """
        self._path = path
        self.measured: list[Measured] = []
        header = json.dumps({"fingerprint": fingerprint})
        # What stands behind the last line feed is half a line.
        found = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        if found and found[0] != header:
            raise ValueError(
                f"{path} holds measures of another model, data, reward or sampling; delete it to "
                "start again, or choose another --out"
            )
        lines = found[1:]
        whole = len(lines) if len(lines) == total else len(lines) // lot * lot
        self.measured = [Measured(**json.loads(line)) for line in lines[:whole]]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in [header, *lines[:whole]]))

    def add(self, lot: Sequence[Measured]) -> None:
        """Writes the measures of a further lot."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(one._asdict())}\n" for one in lot))
            file.flush()
            os.fsync(file.fileno())
        self.measured.extend(lot)


def fingerprint(config: Config, examples: Sequence[Example], *, samples: int) -> str:
    """A digest of everything that the measures depend on; files of weights count by size and time
    of change."""
    files = [path.stat() for path in sorted(Path(config.model.path).glob("*.safetensors"))]
    tables = {
        "model": [config.model.path, *((file.st_size, file.st_mtime_ns) for file in files)],
        "reward": config.reward.path[0],
        "sampling": config.sampling.model_dump(exclude={"max_batch"}),
        "precision": config.precision,
        "sampler": config.sampler.name,
        "seed": config.seed,
        "samples": samples,
        "lot": config.train.train_batch,
    }
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode())
    for example in examples:
        digest.update(json.dumps(dict(example.record), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def measure(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    done: int,
    lot: int,
    samples: int,
    sampling: SamplingParams,
    reward: Reward,
    tokenizer: Tokenizer,
) -> Iterator[Lot]:
    """Answers every prompt `samples` times and scores the answers.

    Lots have seeds of their own, so that measures which are taken up again are those of a run that
    was never interrupted.

    Args:
      sampler: serves the policy.
      examples: the prompts.
      done: this many are measured already, a multiple of `lot`.
      lot: prompts that are measured at a time.
      samples: answers to each.
      sampling: how they are drawn.
      reward: what counts as right, usually 0 or 1; its weight is not applied.
      tokenizer: the model's.

    Raises:
      RuntimeError: if the reward fails on every answer of the first lot.
    """
    for start in range(done, len(examples), lot):
        these = examples[start : start + lot]
        seed = int(np.random.SeedSequence((sampling.seed, start)).generate_state(1)[0])
        answers = sampler.sample(
            [example.tokens for example in these],
            dataclasses.replace(sampling, seed=seed),
            group_size=samples,
        )
        texts, records, owners = [], [], []
        truncated = np.zeros(len(these), int)
        for answer in answers:
            texts.append(tokenizer.decode(answer.tokens, skip_special_tokens=True))
            records.append(these[answer.prompt_index].record)
            owners.append(answer.prompt_index)
            truncated[answer.prompt_index] += answer.finish_reason == "length"
        scored = scoring.score([reward], texts, records)
        values, owner = scored.parts[reward.name], np.array(owners)
        if start == done and np.isnan(values).all():
            raise RuntimeError(f"no answer could be scored; {scored.first_failure}")
        yield Lot(
            [_measured(values[owner == i], int(truncated[i])) for i in range(len(these))],
            scored.first_failure,
        )


def write_kept(
    path: Path,
    examples: Sequence[Example],
    measured: Sequence[Measured],
    *,
    low: float,
    high: float,
) -> int:
    """Writes the rows of the prompts whose accuracy lies in [low, high], as they stand in the data
    with the column `base_accuracy` added, as JSON lines; returns their number."""
    kept = [
        {**example.row, COLUMN: one.accuracy}
        for example, one in zip(examples, measured, strict=False)
        if one.within(low, high)
    ]
    write_whole(
        path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in kept)
    )
    return len(kept)


def _measured(values: np.ndarray, truncated: int) -> Measured:
    scored = values[~np.isnan(values)]
    accuracy = float(scored.mean()) if scored.size else None
    return Measured(accuracy, int(values.size - scored.size), truncated)
