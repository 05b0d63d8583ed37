"""Metrics of sampled completions: diversity, repetition, lengths and entropy.

All are functions of token ids and log-probs, and take milliseconds. Diversity is measured across
prompts: a policy that has learnt a task may always give a prompt the same completion; in a collapse
completions no longer depend on the prompt.
"""

import re
from collections.abc import Sequence

import numpy as np

from jaxrl.core.batch import Rollout, by_group

_MARK = re.compile(r"^[ \t]*(?:[-*+\u2022]|\d+[.)]|#{1,6})[ \t]|\*\*[^*\n]+\*\*|\\boxed\{", re.M)
_GRAM = 3  # tokens of an n-gram
_TAIL = 256  # last tokens of a completion, in which repetition is measured
_QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


def completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Computes the metrics of one step's completions, at least one.

    Returns:
      "diversity/distinct", distinct 3-grams / 3-grams over the first completion of every prompt
      (distinct-n of arXiv:1510.03055); "diversity/identical", share of completions identical to
      another of their prompt; "diversity/repetition", mean of 1 - distinct 3-grams / 3-grams in a
      completion's last 256 tokens; "entropy/sampled", mean -log p of the sampled tokens in nats, an
      unbiased estimate of the sampler's entropy; "groups/sampled", number of prompts; quantiles
      "/min", "/p10", "/p50", "/p90", "/max" of "reward" (where known) and of "completion_length" in
      tokens.
    """
    groups = by_group(rollouts).values()
    ids = [rollout.completion for rollout in rollouts]
    metrics = {
        "diversity/distinct": distinct([group[0].completion for group in groups]),
        "diversity/identical": identical([[r.completion for r in group] for group in groups]),
        "diversity/repetition": float(np.mean([1 - distinct([x[-_TAIL:]]) for x in ids])),
        "groups/sampled": float(len(groups)),
    }
    logprobs = np.concatenate([part for r in rollouts for part in _sampled(r)])
    logprobs = logprobs[~np.isnan(logprobs)]
    if logprobs.size:
        metrics["entropy/sampled"] = float(-logprobs.astype(np.float64).mean())
    rewards = np.array([r.reward for r in rollouts])
    metrics |= quantiles("reward", rewards[~np.isnan(rewards)])
    return metrics | quantiles("completion_length", np.array([len(x) for x in ids]))


def _sampled(rollout: Rollout) -> list[np.ndarray]:
    """Returns the log-probs of the tokens that the policy sampled, f32[N] each, also where they are
    masked. Those that an environment wrote between turns have 0."""
    if rollout.episode is None:
        return [rollout.logprobs]
    turns = rollout.episode.turns
    return [np.zeros(0, np.float32), *(rollout.logprobs[begin:end] for begin, end, _ in turns)]


def format_marks(texts: Sequence[str]) -> int:
    r"""Counts the marks of format in texts: items of lists, headings, bold words and \boxed{}.

    Example:
      >>> format_marks(["# Sum", "- 1\n- 2\n3. **three**, so \\boxed{6}"])
      6
    """
    return sum(len(_MARK.findall(text)) for text in texts)


def distinct(sequences: Sequence[np.ndarray]) -> float:
    """Computes distinct 3-grams / 3-grams over sequences of token ids, each i[T]; 1 without any. A
    shorter sequence counts as one gram."""
    grams = np.sort(np.concatenate([np.zeros(0, np.int64), *map(_grams, sequences)]))
    return (1 + np.count_nonzero(np.diff(grams))) / len(grams) if len(grams) else 1.0


def identical(groups: Sequence[Sequence[np.ndarray]]) -> float:
    """Computes the share of completions, each i[T], identical to another of their group."""
    same = total = 0
    for group in groups:
        completions = [ids.tobytes() for ids in group]
        same += sum(completions.count(one) > 1 for one in completions)
        total += len(completions)
    return same / total


def quantiles(name: str, values: np.ndarray) -> dict[str, float]:
    """Returns {name/min, name/p10, name/p50, name/p90, name/max} of values [N]; {} for N = 0."""
    if not values.size:
        return {}
    found = np.quantile(values, list(_QUANTILES.values()))
    return {f"{name}/{key}": float(x) for key, x in zip(_QUANTILES, found, strict=True)}


def _grams(ids: np.ndarray) -> np.ndarray:
    """Returns the 3-grams of ids i[T] as numbers i64[N], with one digit for each id, all of which
    are below 2^21 - 1."""
    size = min(_GRAM, len(ids))
    grams = np.zeros(len(ids) - size + 1 if size else 0, np.int64)
    for i in range(size):  # no digit is 0, so grams of different sizes differ
        grams = (grams << 21) + ids[i : i + len(grams)] + 1
    return grams
