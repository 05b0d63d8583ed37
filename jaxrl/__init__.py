"""Reinforcement learning for language models in JAX.

The names of this package and of its rooms (`jaxrl.losses`, `jaxrl.learner`, ...) are public; the
`__init__.pyi` of each lists them. They need no config and no run directory. They are imported on
first use, so `import jaxrl` is instant, and a vLLM server, which loads the bridge's plugin from
here, never imports jax.
"""

from importlib import metadata

import lazy_loader

_lazy, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return metadata.version("jaxrl")
    return _lazy(name)
