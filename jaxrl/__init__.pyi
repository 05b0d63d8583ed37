from . import (
    advantages as advantages,
    bridge as bridge,
    core as core,
    data as data,
    diagnostics as diagnostics,
    environments as environments,
    huggingface as huggingface,
    learner as learner,
    losses as losses,
    models as models,
    sampling as sampling,
    sharding as sharding,
)
from .core import Precision as Precision, jit as jit, to_floats as to_floats
from .environments import accuracy as accuracy, rollouts as rollouts
from .huggingface.pretrained import Pretrained as Pretrained, load as load, save as save
from .learner import make_learner as make_learner, minibatch as minibatch
from .losses import grpo as grpo
from .models import from_nnx as from_nnx
from .sampling import EmbeddedSampler as EmbeddedSampler, SamplingParams as SamplingParams

__version__: str
