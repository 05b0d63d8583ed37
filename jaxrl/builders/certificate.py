"""The facts of a run that a certificate of its arithmetic depends on."""

import hashlib
import importlib.metadata
from collections.abc import Collection, Mapping

import jax

from jaxrl.config.mesh import MeshConfig
from jaxrl.config.toml_file import flatten, toml_text
from jaxrl.config.training import Config
from jaxrl.core import Precision, product_unit
from jaxrl.diagnostics import forward_facts
from jaxrl.losses import Clip
from jaxrl.models import DecoderConfig, Kernel

NAME = "certificate.json"
"""Name of the certificate's file in a run directory."""

ALWAYS = {
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.top_k": 0,
    "sampling.min_p": 0.0,
    "lora.rank": 0,
    "train.replay_routing": False,
}
"""Keys of a run that the doctor does not have, each with the value that it measures with."""


def certified_facts(
    sampler: Mapping[str, str],
    precision: Precision,
    *,
    model: DecoderConfig,
    mesh: MeshConfig,
    attention: Kernel,
    clips: Collection[Clip],
    keys: Mapping[str, object] = ALWAYS,
) -> dict[str, str]:
    """Names everything that decides how far learner and sampler may be apart, as texts: model,
    dtype policy, versions, processor, the learner's mesh but for the axis of whole rows, its kernel
    of attention, the clips if there are any, the values of `ALWAYS` in `keys`, and what the sampler
    says of itself (`Serving.facts`)."""
    architecture = hashlib.sha256(repr(model).encode()).hexdigest()[:12]
    cuts = mesh.model_dump(exclude={"data"})
    return {
        "model": f"{model.model_type} {architecture}",
        "device": _device(),
        **{name: toml_text(keys[name]) for name in ALWAYS},
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        **{f"mesh.{name}": toml_text(value) for name, value in cuts.items()},
        "attention": attention,
        **({"clip": _named(clips)} if clips else {}),
        **forward_facts(precision),
        **sampler,
    }


def _device() -> str:
    """Names the kind of the devices; XLA's and vLLM's sums and roundings on a CPU depend on its
    units for products."""
    kind = jax.devices()[0].device_kind
    unit = product_unit() if kind == "cpu" else None
    return f"{kind} {unit}" if unit else kind


def never_certified(config: Config, clips: Collection[Clip]) -> list[str]:
    """Lists, in words, the parts of a run that the doctor does not measure."""
    keys = flatten(config)
    found = [
        f"{name} = {toml_text(keys[name])} (the doctor measures with {toml_text(value)})"
        for name, value in ALWAYS.items()
        if keys[name] != value
    ]
    if len(clips) > 1:
        found.append(f"a loss with several clips ({_named(clips)}; the doctor measures with one)")
    return found


def _named(clips: Collection[Clip]) -> str:
    return " and ".join(sorted(map(str, clips)))
