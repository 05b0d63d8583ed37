"""What answers look like before anybody reads them: variety, repetition, lengths and certainty.

Everything is a function of token ids and takes milliseconds. `distinct` looks across prompts,
because a policy that has learnt a task gives one answer to one prompt: answers that no longer
depend on the prompt are what a collapse is.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.core.batch import Rollout

_N = 3  # tokens of an n-gram
_TAIL = 256  # tokens at the end of an answer in which repetition is looked for
_QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


def variety(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What the answers of a step show.

    Args:
      rollouts: at least one.

    Returns:
      "diversity/distinct", distinct 3-grams / 3-grams over the first answer to every prompt
      (distinct-n of arXiv:1510.03055); "diversity/identical", the share of answers that equal
      another answer to their prompt; "diversity/repetition", 1 - distinct 3-grams / 3-grams of an
      answer's last 256 tokens, mean over answers: near 1 where they go round in circles;
      "entropy/sampled", nats per token, the mean of -log p of what was sampled, an unbiased
      estimate of the sampling distribution's entropy; "groups/sampled", their number; quantiles
      "/min", "/p10", "/p50", "/p90", "/max" of "reward" (where it is known) and of
      "completion_length".
    """
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    ids = [rollout.completion for rollout in rollouts]
    numbers = {
        "diversity/distinct": distinct([group[0].completion for group in groups.values()]),
        "diversity/identical": identical([[r.completion for r in g] for g in groups.values()]),
        "diversity/repetition": float(np.mean([1 - distinct([x[-_TAIL:]]) for x in ids])),
        "groups/sampled": float(len(groups)),
    }
    chosen = np.concatenate([r.logprobs for r in rollouts])
    chosen = chosen[~np.isnan(chosen)]
    if chosen.size:
        numbers["entropy/sampled"] = float(-chosen.astype(np.float64).mean())
    rewards = np.array([r.reward for r in rollouts])
    numbers |= quantiles("reward", rewards[~np.isnan(rewards)])
    return numbers | quantiles("completion_length", np.array([len(x) for x in ids]))


def distinct(sequences: Sequence[np.ndarray]) -> float:
    """Distinct 3-grams / 3-grams over all sequences of token ids, each i[T]; a shorter sequence
    counts as one gram. 1 if there is nothing."""
    grams = [gram for ids in sequences for gram in _grams(ids)]
    return len(set(grams)) / len(grams) if grams else 1.0


def identical(groups: Sequence[Sequence[np.ndarray]]) -> float:
    """The share of answers, each i[T], that equal another answer of their group."""
    same = total = 0
    for group in groups:
        answers = [ids.tobytes() for ids in group]
        same += sum(answers.count(answer) > 1 for answer in answers)
        total += len(answers)
    return same / total


def quantiles(name: str, values: np.ndarray) -> dict[str, float]:
    """{name/min, name/p10, ...} of values [N]; nothing of none."""
    if not values.size:
        return {}
    found = np.quantile(values, list(_QUANTILES.values()))
    return {f"{name}/{key}": float(x) for key, x in zip(_QUANTILES, found, strict=True)}


def _grams(ids: np.ndarray) -> list[bytes]:
    if not len(ids):
        return []
    size = min(_N, len(ids))
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.int32), size)
    # Each window as one opaque value: a set of them counts without a sort.
    return np.ascontiguousarray(windows).view(f"V{4 * size}")[:, 0].tolist()
