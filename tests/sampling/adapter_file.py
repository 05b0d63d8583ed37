"""Random adapters of the served model, in PEFT's format."""

from pathlib import Path

import jax

from jaxrl.huggingface import peft
from jaxrl.models import lora, spec
from jaxrl.models.model import decoder
from tests.sampling.serving import FP32, SERVED


def save_adapter(directory: Path, *, rank: int) -> Path:
    base = decoder(SERVED).specs
    specs = lora.adapter_specs(base, rank=rank, targets=["*_proj"])
    adapters = spec.init(specs, jax.random.key(0), dtype=FP32.wire)
    adapted = lora.Adapted(specs, base, alpha=16.0)
    peft.save_adapter(directory, adapters, specs=adapted, base="base", dtype=FP32.wire)
    return directory
