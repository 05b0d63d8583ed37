"""Summary of an evaluation: accuracy, its confidence interval, pass@k and the majority."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.data import Example
from jaxrl.diagnostics import half_interval, majority, pass_at_k
from jaxrl.environments import final_number
from jaxrl.training.evaluate import Evaluation


def summarize(
    rewards: np.ndarray, examples: Sequence[Example], *, by: str | None
) -> dict[str, Any]:
    """Computes a data set's numbers from rewards alone, as JSON values.

    Args:
      rewards: f64[N, S] of S completions for each of N prompts; NaN where the reward failed, which
        counts as wrong.
      examples: the N prompts.
      by: a column of the data: adds the accuracy for each of its values.

    Raises:
      ValueError: if a row has no such column.
    """
    samples = rewards.shape[1]
    found: dict[str, Any] = {"prompts": len(rewards), "samples": samples, **_accuracy(rewards)}
    if samples > 1:
        powers = {2**i for i in range(samples.bit_length())}
        counts = sorted(k for k in powers | {samples} if k <= samples)
        found["pass@k"] = {str(k): pass_at_k(rewards, k) for k in counts}
    if by is not None:
        found["by"] = {
            value: {"prompts": int(rows.sum()), **_accuracy(rewards[rows])}
            for value, rows in _values(examples, by).items()
        }
    return found


def further(measured: Evaluation) -> dict[str, Any]:
    """Computes a data set's numbers from completions and episodes, as JSON values."""
    found: dict[str, Any] = {"episodes": measured.numbers} if measured.numbers else {}
    if (samples := measured.rewards.shape[1]) > 1:
        answers = [_answer(text) for text in measured.completions]
        grouped = [answers[i : i + samples] for i in range(0, len(answers), samples)]
        found["majority"] = majority(grouped, measured.rewards)
    return found


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Formats the numbers of one data set; the accuracy of all prompts comes last."""
    for name, value in found.get("episodes", {}).items():
        yield f"{name}: {value:.3g}"
    for value, part in found.get("by", {}).items():
        yield f"{value}: {_percent(part)}, {part['prompts']} prompts"
    for k, value in found.get("pass@k", {}).items():
        yield f"pass@{k}: {_percent({'accuracy': value})}"
    if "majority" in found:
        yield f"majority of {found['samples']}: {_percent({'accuracy': found['majority']})}"
    yield f"accuracy: {_percent(found)}"


def _accuracy(rewards: np.ndarray) -> dict[str, float | None]:
    interval = half_interval(rewards)
    return {
        "accuracy": float(np.nan_to_num(rewards).mean()),
        "interval": None if math.isnan(interval) else interval,
        "failed": int(np.isnan(rewards).sum()),
        "completions": rewards.size,
    }


def _percent(part: dict[str, Any]) -> str:
    interval = part.get("interval")
    text = f"{part['accuracy']:.1%}" + (f" ± {interval:.1%}" if interval is not None else "")
    if failed := part.get("failed"):
        text += f" ({failed} of {part['completions']} could not be scored)"
    return text.replace("%", " %")


def _answer(text: str) -> Any:
    """Returns a completion's vote: its final number, else its last line."""
    number = final_number(text)
    return number if number is not None else (text.strip().splitlines() or [None])[-1]


def _values(examples: Sequence[Example], column: str) -> dict[str, np.ndarray]:
    """Maps each value of a column to bool[N], the prompts with this value."""
    for example in examples:
        if column not in example.row:
            has = ", ".join(map(str, example.row))
            raise ValueError(f"--by {column}: a row has no such column; it has {has}")
    values = np.array([str(example.row[column]) for example in examples])
    return {value: values == value for value in dict.fromkeys(values.tolist())}
