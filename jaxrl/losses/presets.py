"""Corrections under their usual names, with their usual bounds.

All compare the anchor with the sampler and go with a loss whose ratio is `over_anchor`; rejections
go with any loss. They are multiplied, or joined by " + " in a config.

Example:
  >>> from jaxrl.losses import clipped, over_anchor
  >>> icepop * clipped(over_anchor)
  masked(anchor_over_sampler, low=0.5, high=5.0) * clipped(over_anchor, low=0.2, high=0.2)
  >>> from jaxrl.losses import one_sequence
  >>> names = (token_tis, sequence_tis, sequence_mis, sequence_mis_3)
  >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=0, anchor=-1, sampler=[-1.5, -2])
  >>> for weights in (*names, geometric_mask, k3_mask, veto):
  ...     print(weights.apply(scores, batch)[0].round(2), weights)
  [[1.65 2.  ]] truncated(anchor_over_sampler, low=0.0, high=2.0)
  [[2. 2.]] truncated(product(anchor_over_sampler), low=0.0, high=2.0)
  [[4.48 4.48]] masked(product(anchor_over_sampler), low=0.0, high=10.0)
  [[0. 0.]] masked(product(anchor_over_sampler), low=0.0, high=3.0)
  [[0. 0.]] within(geometric(anchor_over_sampler), low=0.999, high=1.001)
  [[0. 0.]] k3_within(anchor_over_sampler, high=0.01)
  [[1. 1.]] vetoed(anchor_over_sampler, low=0.0001, high=inf)
"""

from jaxrl.losses.aggregation import sequence_mean_token_mean, token_mean
from jaxrl.losses.corrections import masked, normalized, truncated
from jaxrl.losses.ratios import anchor_over_sampler, geometric, product
from jaxrl.losses.rejections import (
    k2_sum_within,
    k2_within,
    k3_sum_within,
    k3_within,
    vetoed,
    within,
)

token_tis = truncated(anchor_over_sampler, high=2.0)
"""min(w, 2), w = anchor / sampler of the token: truncated importance sampling (Yao et al. 2025)."""

sequence_tis = truncated(product(anchor_over_sampler), high=2.0)
"""min(W, 2), W = product of w over the sequence."""

token_tis_normalized = normalized(token_tis, token_mean)
"""token_tis divided by its mean over the tokens of the batch."""

sequence_tis_normalized = normalized(sequence_tis, sequence_mean_token_mean)
"""sequence_tis divided by its mean over the sequences of the batch."""

sequence_mis = masked(product(anchor_over_sampler), high=10.0)
"""W where W <= 10 and 0 elsewhere: masked importance sampling per sequence (Liu et al. 2025)."""

sequence_mis_3 = masked(product(anchor_over_sampler), high=3.0)
"""W where W <= 3 and 0 elsewhere: TRL's bound."""

icepop = masked(anchor_over_sampler, low=0.5, high=5.0)
"""w where .5 <= w <= 5 and 0 elsewhere (IcePop, arXiv:2510.18855)."""

geometric_mask = within(geometric(anchor_over_sampler), low=0.999, high=1.001)
"""1, and 0 for sequences whose geometric mean of w is not in .999 to 1.001."""

k3_mask = k3_within(anchor_over_sampler, high=0.01)
"""1, and 0 for sequences whose mean of w - 1 - log w, the k3 estimate, exceeds .01 per token."""

k2_mask = k2_within(anchor_over_sampler, high=0.01)
"""1, and 0 for sequences whose mean of (log w)^2 / 2, the k2 estimate, exceeds .01 per token."""

k3_sum_mask = k3_sum_within(anchor_over_sampler, high=2.0)
"""1, and 0 for sequences whose sum of w - 1 - log w exceeds 2."""

k2_sum_mask = k2_sum_within(anchor_over_sampler, high=2.0)
"""1, and 0 for sequences whose sum of (log w)^2 / 2 exceeds 2."""

veto = vetoed(anchor_over_sampler, low=1e-4)
"""1, and 0 for sequences with a token whose w is below 1e-4."""
