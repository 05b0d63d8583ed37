"""Weights from a learner to vLLM servers, bit for bit. Importing it loads no jax."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
