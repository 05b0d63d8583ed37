"""Losses of pairs: a chosen and a rejected completion of one prompt.

In a batch the completions of a pair are consecutive sequences of one row: 1 and 2, 3 and 4, and so
on, the chosen one first. The advantages of the chosen completion add up to the margin of the
Bradley-Terry loss.

The examples have one pair: log-ratios 1 over 4 tokens (chosen) and -1 over 2 (rejected).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
