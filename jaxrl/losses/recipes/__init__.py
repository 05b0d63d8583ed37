"""Published algorithms, each a few lines of algebra.

A recipe is a function of keyword parameters that returns a `Recipe`. A config can name each, with
its parameters and the attributes of `Terms` as keys. A parameter without a description means the
same as in `grpo`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
