"""How far two programs agree about tokens that one of them drew, with the same weights.

Nothing has moved here: all of the log-ratio is beta, and every token that a clip takes is taken
for nothing.
"""

from typing import NamedTuple

import numpy as np

from jaxrl.monitoring.ratio.split import Tokens, split

_FEWEST_SEQUENCES = 8  # whose spread is worth a number


class Pairs(NamedTuple):
    """Two log-probs of N tokens, in the order of their sequences.

    Attributes:
      learner, sampler: f64[N].
      sequences: i64[N], which sequence each belongs to, from 0.
    """

    learner: np.ndarray
    sampler: np.ndarray
    sequences: np.ndarray


def agreement(pairs: Pairs, *, low: float, high: float) -> dict[str, float]:
    """Everything that is known of the disagreement.

    Whether a clip takes a token depends on the sign of its advantage, which is not known here: each
    token counts twice, once with either sign.

    Args:
      pairs: at least one token.
      low: PPO's clip takes ratios below 1 - low,
      high: and above 1 + high.

    Returns:
      As `split.split`, with all of the log-ratio as beta; "phantom_low" and "phantom_high", the
      shares of tokens below and above the clip (their mean is "phantom"); "token_mult_error",
      E[exp |beta|]; "sequence_std_L" for L = 1, 2, 4, ... tokens, the standard deviation of the sum
      of the first L betas over the sequences that are so long, where there are at least 8.
    """
    count = len(pairs.learner)
    twice = Tokens(
        learner=np.tile(pairs.learner, 2),
        shadow=np.tile(pairs.sampler, 2),
        sampler=np.tile(pairs.sampler, 2),
        advantages=np.repeat([1.0, -1.0], count),
        sequences=np.concatenate([pairs.sequences, pairs.sequences + pairs.sequences.max() + 1]),
    )
    beta = pairs.learner - pairs.sampler
    found = split(twice, low=low, high=high)
    # What it says of alpha, of the advantage and of clips that are no phantoms is empty here.
    empty = ("alpha", "alpha_std", "alpha_p99", "beta_advantage", "phantom_share")
    kept = {k: v for k, v in found.items() if k not in empty and not k.startswith("clipped")}
    return {
        **kept,
        "phantom_low": 2 * found["clipped_low"],
        "phantom_high": 2 * found["clipped_high"],
        "token_mult_error": float(np.exp(np.abs(beta)).mean()),
        **{
            f"sequence_std_{length}": float(sums.std())
            for length, sums in prefix_sums(beta, pairs.sequences)
            if len(sums) >= _FEWEST_SEQUENCES
        },
    }


def prefix_sums(values: np.ndarray, sequences: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Sums over the beginnings of sequences.

    Args:
      values: f64[N], in the order of the sequences.
      sequences: i64[N], which sequence each belongs to.

    Returns:
      (L, sums over the first L values of every sequence that has so many) for L = 1, 2, 4, ... up
      to the longest.
    """
    cut = np.flatnonzero(np.diff(sequences)) + 1
    sums = [np.cumsum(part) for part in np.split(values, cut)]
    longest = max(map(len, sums))
    return [
        (length, np.array([s[length - 1] for s in sums if len(s) >= length]))
        for length in (2**i for i in range(longest.bit_length()))
    ]
