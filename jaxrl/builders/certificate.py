"""The facts of a run that a certificate of its arithmetic depends on."""

import hashlib
import importlib.metadata
from collections.abc import Mapping

import jax

from jaxrl.core import Precision
from jaxrl.diagnostics import forward_facts
from jaxrl.models import DecoderConfig

NAME = "certificate.json"
"""Name of the certificate's file in a run directory."""


def certified_facts(
    sampler: Mapping[str, str], precision: Precision, *, model: DecoderConfig, temperature: float
) -> dict[str, str]:
    """Names everything that decides how far learner and sampler may be apart, as texts: model,
    dtype policy, versions, processor, and what the sampler says of itself (`Serving.facts`)."""
    architecture = hashlib.sha256(repr(model).encode()).hexdigest()[:12]
    return {
        "model": f"{model.model_type} {architecture}",
        "sampling.temperature": f"{temperature:g}",
        "device": jax.devices()[0].device_kind,
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        **forward_facts(precision),
        **sampler,
    }
