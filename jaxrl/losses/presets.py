"""Corrections by the names under which they are known, with the bounds that are usual for them.

All compare the anchor with the sampler and go with a loss whose ratio is `over_anchor`; those that
only reject go with any. Joined by `algebra.both`, or by " + " in a config.
"""

from jaxrl.losses.corrections import masked, truncated
from jaxrl.losses.ratios import anchor_over_sampler, geometric, product
from jaxrl.losses.rejections import k3_within, vetoed, within

token_tis = truncated(anchor_over_sampler, high=2.0)
"""Truncated importance sampling per token (Yao et al. 2025)."""

sequence_tis = truncated(product(anchor_over_sampler), high=2.0)
"""Truncated importance sampling per sequence."""

sequence_mis = masked(product(anchor_over_sampler), high=10.0)
"""Masked importance sampling per sequence (Liu et al. 2025)."""

sequence_mis_3 = masked(product(anchor_over_sampler), high=3.0)
"""The same with TRL's bound."""

icepop = masked(anchor_over_sampler, low=0.5, high=5.0)
"""IcePop (arXiv:2510.18855): masked importance sampling per token, on both sides."""

geometric_mask = within(geometric(anchor_over_sampler), low=0.999, high=1.001)
"""Rejects sequences whose mean log-ratio is not within .001 of 0."""

k3_mask = k3_within(anchor_over_sampler, high=0.01)
"""Rejects sequences whose k3 estimate of the divergence exceeds .01 per token."""

veto = vetoed(anchor_over_sampler, below=1e-4)
"""Rejects sequences with a token that the learner holds for 10,000 times less likely."""
