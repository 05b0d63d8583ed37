"""Disagreement of two programs about the log-probs of the same tokens at the same weights.

As the policy did not move, the whole log-ratio is beta and every clipped token is a phantom.
"""

import numpy as np

from jaxrl.diagnostics.ratio.split import LogRatio, split_log_ratio
from jaxrl.losses.algebra import Clip

_FEWEST_SEQUENCES = 8  # for a standard deviation over sequences


def agreement_metrics(tokens: LogRatio, *, low: float, high: float) -> dict[str, float]:
    """Computes all metrics of the disagreement of `tokens.learner` and `tokens.sampler`.

    The sign of a token's advantage decides on which side it is clipped. The sign is taken as
    unknown, so each token counts twice, once with either sign. PPO clips ratios below 1 - low and
    above 1 + high. There must be at least one token.

    Returns:
      The metrics of `split_log_ratio`, with the whole log-ratio as beta; "phantom_low" and
      "phantom_high", shares of tokens below and above the clip (their mean is "phantom");
      "token_mult_error", E[exp |beta|]; "sequence_std_L" for L = 1, 2, 4, ... tokens, standard
      deviation of the sum of the first L betas over sequences of at least L tokens, if there are
      at least 8.
    """
    count = len(tokens.learner)
    twice = LogRatio(
        learner=np.tile(tokens.learner, 2),
        shadow=np.tile(tokens.sampler, 2),
        sampler=np.tile(tokens.sampler, 2),
        advantages=np.repeat([1.0, -1.0], count),
        sequences=np.concatenate([tokens.sequences, tokens.sequences + tokens.sequences.max() + 1]),
    )
    beta = tokens.learner - tokens.sampler
    metrics = split_log_ratio(twice, low=low, high=high)
    # Meaningless here: alpha is 0, the advantages are made up and every clip is a phantom.
    dropped = ("alpha", "alpha_std", "alpha_p99", "beta_advantage", "phantom_share")
    kept = {k: v for k, v in metrics.items() if k not in dropped and not k.startswith("clipped")}
    return {
        **kept,
        "phantom_low": 2 * metrics["clipped_low"],
        "phantom_high": 2 * metrics["clipped_high"],
        "token_mult_error": float(np.exp(np.abs(beta)).mean()),
        **{
            f"sequence_std_{length}": float(sums.std())
            for length, sums in prefix_sums(beta, tokens.sequences)
            if len(sums) >= _FEWEST_SEQUENCES
        },
    }


def phantom_clips(tokens: LogRatio, clip: Clip) -> dict[str, float]:
    """Computes "phantom", "phantom_low" and "phantom_high" of `agreement_metrics` for a clip, which
    may be one of whole sequences: all of their tokens are then clipped together."""
    if clip.unit != "token":
        beta = np.bincount(tokens.sequences, weights=tokens.learner - tokens.sampler)
        if clip.unit == "mean":
            beta = beta / np.bincount(tokens.sequences)
        tokens = tokens._replace(learner=tokens.sampler + beta[tokens.sequences])
    found = agreement_metrics(tokens, low=clip.low, high=clip.high)
    return {name: found[name] for name in ("phantom", "phantom_low", "phantom_high")}


def prefix_sums(values: np.ndarray, sequences: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Sums the beginnings of sequences.

    Args:
      values: f64[N], in the order of the sequences.
      sequences: i64[N], index of the value's sequence.

    Returns:
      (L, sums over the first L values of every sequence with at least L) for L = 1, 2, 4, ... up to
      the longest sequence.
    """
    ends = np.flatnonzero(np.diff(sequences)) + 1
    sums = [np.cumsum(part) for part in np.split(values, ends)]
    longest = max(map(len, sums))
    return [
        (length, np.array([s[length - 1] for s in sums if len(s) >= length]))
        for length in (2**i for i in range(longest.bit_length()))
    ]
