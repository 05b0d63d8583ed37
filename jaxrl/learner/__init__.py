"""The training step: pure functions over one state, and checkpoints of that state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
