"""Dtype policies, batches, packing, exact metrics and processes: what every other room uses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
