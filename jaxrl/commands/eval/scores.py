"""Summary of an evaluation: accuracy, its confidence interval, pass@k and the majority."""

import collections
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.data.prompts import Example
from jaxrl.environments.rewards.builtin import final_number
from jaxrl.training.evaluate import Evaluation


def summarize(
    measured: Evaluation, examples: Sequence[Example], *, by: str | None
) -> dict[str, Any]:
    """Computes the numbers of one data set, as JSON values.

    Args:
      measured: S completions of each of N prompts.
      examples: the N prompts.
      by: a column of the data, for the accuracy of each of its values; None for none.

    Raises:
      ValueError: if a row has no such column.
    """
    rewards = measured.rewards
    samples = rewards.shape[1]
    found: dict[str, Any] = {"prompts": len(rewards), "samples": samples, **_accuracy(rewards)}
    if samples > 1:
        powers = {2**i for i in range(samples.bit_length())}
        counts = sorted(k for k in powers | {samples} if k <= samples)
        found["pass@k"] = {str(k): _known(pass_at_k(rewards, k)) for k in counts}
        answers = [_answer(text) for text in measured.completions]
        grouped = [answers[i : i + samples] for i in range(0, len(answers), samples)]
        found["majority"] = majority(grouped, rewards)
    if by is not None:
        found["by"] = {
            value: {"prompts": int(rows.sum()), **_accuracy(rewards[rows])}
            for value, rows in _values(examples, by).items()
        }
    return found | ({"episodes": measured.numbers} if measured.numbers else {})


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
    yield f"held-out accuracy: {_percent(found)}"


def _accuracy(rewards: np.ndarray) -> dict[str, float | None]:
    known = rewards[~np.isnan(rewards)]
    return {
        "accuracy": float(known.mean()) if known.size else None,
        "interval": _known(half_interval(rewards)),
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _percent(part: dict[str, Any]) -> str:
    if part["accuracy"] is None:
        return "not known"
    interval = part.get("interval")
    text = f"{part['accuracy']:.1%}" + (f" ± {interval:.1%}" if interval is not None else "")
    return text.replace("%", " %")


def _answer(text: str) -> Any:
    """Returns what a completion votes for: its final number, else its last line."""
    number = final_number(text)
    return number if number is not None else (text.strip().splitlines() or [None])[-1]


def _values(examples: Sequence[Example], column: str) -> dict[str, np.ndarray]:
    """Maps each value of a column to bool[N], the prompts that have it."""
    for example in examples:
        if column not in example.row:
            has = ", ".join(map(str, example.row))
            raise ValueError(f"--by {column}: a row has no such column; it has {has}")
    values = np.array([str(example.row[column]) for example in examples])
    return {value: values == value for value in dict.fromkeys(values.tolist())}


def pass_at_k(rewards: np.ndarray, k: int) -> float:
    """Estimates the probability that at least one of k completions of a prompt is right, without
    bias (arXiv:2107.03374, equation 1): the mean over prompts of 1 - C(n - c, k) / C(n, k), where c
    of a prompt's n completions are right.

    Args:
      rewards: f64[N, S]; a reward above 1/2 counts as right, NaN as no completion.
      k: from 1 to S.

    Returns:
      NaN if no prompt has k completions.
    """
    known = (~np.isnan(rewards)).sum(axis=1)
    right = (rewards > 0.5).sum(axis=1)
    shares = [
        1 - math.comb(n - c, k) / math.comb(n, k)
        for n, c in zip(known.tolist(), right.tolist(), strict=True)
        if n >= k
    ]
    return float(np.mean(shares)) if shares else math.nan


def majority(answers: Sequence[Sequence[Hashable]], rewards: np.ndarray) -> float:
    """Returns the share of prompts whose most frequent answer is right (self-consistency,
    arXiv:2203.11171). Answers that are equally frequent share the prompt.

    Args:
      answers: of S completions of each of N prompts; None votes for nothing.
      rewards: f64[N, S]; above 1/2 is right.
    """
    shares = []
    for given, values in zip(answers, rewards, strict=True):
        votes = collections.Counter(answer for answer in given if answer is not None)
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        right = [float(values[list(given).index(answer)] > 0.5) for answer in winners]
        shares.append(float(np.mean(right)) if right else 0.0)
    return float(np.mean(shares))


def half_interval(rewards: np.ndarray) -> float:
    """Returns half the width of the 95 % confidence interval of the mean reward: 1.96 standard
    errors over prompts, whose completions depend on each other (arXiv:2411.00640).

    Args:
      rewards: f64[N, S]; NaN where there is none.

    Returns:
      NaN for fewer than two prompts with a reward.
    """
    known = rewards[~np.isnan(rewards).all(axis=1)]
    if len(known) < 2:
        return math.nan
    return float(1.96 * np.nanmean(known, axis=1).std(ddof=1) / math.sqrt(len(known)))
