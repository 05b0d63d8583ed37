"""Token ids in, token ids and their log-probs out: decoding in JAX, and clients of vLLM."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
