"""Published algorithms, each a few lines of algebra.

A recipe is a function of keyword parameters that returns a `Recipe`. All can be named in a config,
with their parameters as keys, and take the keys of `recipe.Terms` besides. A parameter without a
description of its own is that of `grpo`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
