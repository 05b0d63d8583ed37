"""Advantages: the worth of a completion beyond expectation, from its rewards (host, numpy)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
