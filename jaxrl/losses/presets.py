"""Corrections by the names under which they are known, with the bounds that are usual for them.

All compare the anchor with the sampler and go with a loss whose ratio is `over_anchor`; those that
only reject go with any. Joined by `algebra.both`, or by " + " in a config.
"""

from jaxrl.losses.corrections import masked, truncated
from jaxrl.losses.ratios import anchor_over_sampler, geometric, product
from jaxrl.losses.rejections import k3_within, vetoed, within

token_tis = truncated(anchor_over_sampler, high=2.0)
"""min(w, 2), w = anchor / sampler of the token: truncated importance sampling (Yao et al. 2025)."""

sequence_tis = truncated(product(anchor_over_sampler), high=2.0)
"""min(W, 2), W = product of w over the sequence."""

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

veto = vetoed(anchor_over_sampler, below=1e-4)
"""1, and 0 for sequences with a token whose w is below 1e-4."""
