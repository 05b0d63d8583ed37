"""Reinforcement learning for language models in JAX.

The names below are the front of the library: they need no config and no run directory. They are
imported when they are first used, so that `import jaxrl` is instant and a vLLM server, which loads
the bridge's plugin from this package, never imports jax.
"""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl import losses
    from jaxrl.core.metrics import to_floats
    from jaxrl.core.precision import Precision, jit
    from jaxrl.environments.episodes.single_turn import rollouts
    from jaxrl.huggingface.pretrained import load
    from jaxrl.learner.minibatch import minibatch
    from jaxrl.learner.policy import make_learner
    from jaxrl.losses import grpo
    from jaxrl.models.nnx import from_nnx
    from jaxrl.sampling.base import SamplingParams
    from jaxrl.sampling.embedded.sampler import EmbeddedSampler

    __version__: str

__all__ = [
    "EmbeddedSampler",
    "Precision",
    "SamplingParams",
    "__version__",
    "from_nnx",
    "grpo",
    "jit",
    "load",
    "losses",
    "make_learner",
    "minibatch",
    "rollouts",
    "to_floats",
]

_HOMES = {
    "EmbeddedSampler": "jaxrl.sampling.embedded.sampler",
    "Precision": "jaxrl.core.precision",
    "SamplingParams": "jaxrl.sampling.base",
    "from_nnx": "jaxrl.models.nnx",
    "grpo": "jaxrl.losses",
    "jit": "jaxrl.core.precision",
    "load": "jaxrl.huggingface.pretrained",
    "make_learner": "jaxrl.learner.policy",
    "minibatch": "jaxrl.learner.minibatch",
    "rollouts": "jaxrl.environments.episodes.single_turn",
    "to_floats": "jaxrl.core.metrics",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "losses":
        return importlib.import_module("jaxrl.losses")
    if name == "__version__":
        return metadata.version("jaxrl")
    raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
