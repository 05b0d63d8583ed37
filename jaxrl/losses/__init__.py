"""Losses composed like numbers: `clipped(over_sampler) + 0.001 * kl_penalty()`.

A ratio compares two policies, a surrogate turns ratio and advantage into a loss per token,
corrections reweight it, regularizers are added, and one aggregation reduces it. Every part prints
as the expression that makes it.

Example:
  >>> weights = truncated(anchor_over_sampler, high=2)
  >>> weights * clipped(over_anchor) + 0.001 * kl_penalty()
  truncated(anchor_over_sampler, low=0.0, high=2) * clipped(over_anchor, low=0.2, high=0.2)
  + 0.001 * kl_penalty(k3)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
