"""One decoder for all families: its parameters, attention kernels, log-probs and LoRA."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
