"""Pass rates of prompts, and the prompts whose pass rate lies within bounds.

A working trainer must reach full training accuracy on prompts that the model already solves
sometimes. A curve that stays below or falls points to a fault in the trainer: this is the sanity
test of arXiv:2510.26788.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config.training import Config
from jaxrl.core import write_whole
from jaxrl.data import Example, Tokenizer
from jaxrl.environments import Reward, score
from jaxrl.sampling import Sampler, SamplingParams

COLUMN = "pass_rate"


class Measured(NamedTuple):
    """The outcome of one prompt."""

    # Mean reward over the scored completions; None if the reward failed on all.
    pass_rate: float | None
    failed: int  # completions on which the reward failed
    truncated: int  # completions that reached max_tokens

    def within(self, low: float, high: float) -> bool:
        """Tells if the pass rate lies in [low, high]."""
        rounding = 1e-9
        return self.pass_rate is not None and low - rounding <= self.pass_rate <= high + rounding


class Journal:
    """A file of JSON lines, one for each prompt measured so far; it survives an interruption at any
    moment."""

    def __init__(self, path: Path, *, fingerprint: Mapping[str, str], chunk: int, total: int):
        """Opens or creates the file for `total` prompts and drops an incomplete chunk.

        Raises:
          ValueError: if the file has another fingerprint; the message names the keys that differ.
        """
        self._path, self.chunk = path, chunk
        header = json.dumps({"fingerprint": fingerprint})
        # Anything after the last line feed is an unfinished line.
        found = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        if found and found[0] != header:
            raise ValueError(
                f"{path} was measured with another {_difference(found[0], fingerprint)}; delete it "
                "or choose another --out"
            )
        lines = found[1:]
        whole = len(lines) if len(lines) == total else len(lines) // chunk * chunk
        self.measured = [Measured(**json.loads(line)) for line in lines[:whole]]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{line}\n" for line in [header, *lines[:whole]]))

    def add(self, chunk: Sequence[Measured]) -> None:
        """Appends the next chunk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(one._asdict())}\n" for one in chunk))
            file.flush()
            os.fsync(file.fileno())
        self.measured.extend(chunk)


def fingerprint(config: Config, examples: Sequence[Example], *, samples: int) -> dict[str, str]:
    """Digests everything that the pass rates depend on, by the key that sets it; weight files count
    by size and time of change."""
    files = [path.stat() for path in sorted(Path(config.model.path).glob("*.safetensors"))]
    sampling = config.sampling.model_dump(exclude={"max_batch"})
    values = {
        "model.path": [config.model.path, *((file.st_size, file.st_mtime_ns) for file in files)],
        "data.path": [dict(example.record) for example in examples],
        "reward.path": config.reward.path[0],
        **{f"sampling.{name}": value for name, value in sampling.items()},
        "precision": config.precision.text,
        "sampler.name": config.sampler.name,
        "seed": config.seed,
        "--samples": samples,
        "train.train_batch": config.train.train_batch,
    }
    return {name: _digest(value) for name, value in values.items()}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _difference(header: str, fingerprint: Mapping[str, str]) -> str:
    """Names the keys in which the first line of a journal differs from a fingerprint."""
    try:
        there = dict(json.loads(header)["fingerprint"])
    except (KeyError, TypeError, ValueError):  # of an earlier version, or damaged
        there = {}
    changed = [name for name, digest in fingerprint.items() if there.get(name) != digest]
    return ", ".join(changed)


def measure(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    journal: Journal,
    samples: int,
    sampling: SamplingParams,
    reward: Reward,
    tokenizer: Tokenizer,
) -> Iterator[tuple[list[Measured], str | None]]:
    """Samples and scores `samples` completions of every prompt that the journal does not have.
    Yields the outcomes of a chunk of prompts, with the first failure of the reward among them.

    Every chunk has its own seed, so a resumed measurement equals an uninterrupted one. The weight
    of the reward is not applied.

    Raises:
      RuntimeError: if the reward fails on every completion of the first chunk.
    """
    done = len(journal.measured)
    for start in range(done, len(examples), journal.chunk):
        these = examples[start : start + journal.chunk]
        seed = int(np.random.SeedSequence((sampling.seed, start)).generate_state(1)[0])
        prompts = [example.tokens for example in these]
        drawn = dataclasses.replace(sampling, seed=seed)
        completions = list(sampler.sample(prompts, drawn, group_size=samples))
        texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
        records = [these[c.prompt_index].record for c in completions]
        owner = np.array([c.prompt_index for c in completions])
        truncated = np.array([c.finish_reason == "length" for c in completions])
        scored = score([reward], texts, records)
        values = scored.components[reward.name]
        if start == done and np.isnan(values).all():
            raise RuntimeError(f"the reward failed on every completion; {scored.first_failure}")
        yield (
            [_measured(values[owner == i], truncated[owner == i]) for i in range(len(these))],
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
    """Writes the rows whose pass rate lies in [low, high], with the column `pass_rate` added, as
    JSON lines; returns their number."""
    kept = [
        {**example.row, COLUMN: one.pass_rate}
        for example, one in zip(examples, measured, strict=False)
        if one.within(low, high)
    ]
    write_whole(
        path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in kept)
    )
    return len(kept)


def _measured(values: np.ndarray, truncated: np.ndarray) -> Measured:
    scored = values[~np.isnan(values)]
    pass_rate = float(scored.mean()) if scored.size else None
    return Measured(pass_rate, int(values.size - scored.size), int(truncated.sum()))
