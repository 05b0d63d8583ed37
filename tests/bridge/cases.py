"""Tiny models and recording servers for the bridge's tests."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import InFlight, LearnerIdentity, TensorSpec, Timings, WeightSource
from jaxrl.bridge.manifest import Manifest
from jaxrl.bridge.payload import MappedTensor
from jaxrl.bridge.safetensors_file import plan_file
from jaxrl.models import spec
from jaxrl.models.components import ClampedGate, Experts, Linear
from jaxrl.models.families import DecoderConfig
from jaxrl.models.model import decoder
from jaxrl.models.rope import Rope, YarnScaling
from jaxrl.models.spec import Params, ParamSpec

QWEN3 = DecoderConfig(
    model_type="qwen3",
    vocab_size=128,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    rms_norm_eps=1e-6,
    rope=Rope(theta=10000.0),
    qkv_bias=False,
    qk_norm="head",
    tied=True,
    max_positions=512,
    initializer_range=0.2,  # large, so that other weights give other tokens
    eos_ids=(1,),
    pad_id=0,
)
LEARNER = LearnerIdentity("a run on a host", "0123456789abcdef")
FAMILIES = {
    "qwen3_tied": QWEN3,
    "qwen3": dataclasses.replace(QWEN3, tied=False),
    "qwen2": dataclasses.replace(
        QWEN3,
        model_type="qwen2",
        tied=False,
        qkv_bias=True,
        qk_norm=None,
        num_heads=2,
        num_kv_heads=1,
    ),
    "llama": dataclasses.replace(QWEN3, model_type="llama", tied=False, qk_norm=None),
    "mistral": dataclasses.replace(
        QWEN3, model_type="mistral", tied=False, qk_norm=None, windows=(16, 16)
    ),
    "gemma3": dataclasses.replace(
        QWEN3,
        model_type="gemma3_text",
        norms="both",
        norm_plus_one=True,
        activation="gelu_tanh",
        scaled_embedding=True,
        query_scalar=24,
        windows=(16, None),
        ropes=(Rope(theta=300.0), QWEN3.rope),
    ),
    "phi3": dataclasses.replace(QWEN3, model_type="phi3", tied=False, qk_norm=None, fused=True),
}

EXPERTS = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    tied=False,
    experts=Experts(count=4, per_token=2, intermediate_size=64, renormalise=True),
)
# A dense layer first, corrections in f32, a shared expert, half of a head rotated.
CORRECTED = dataclasses.replace(
    EXPERTS,
    model_type="glm4_moe",
    rope=Rope(theta=10000.0, share=0.5),
    experts=Experts(
        count=4,
        per_token=2,
        intermediate_size=64,
        renormalise=True,
        scores="sigmoid",
        corrected=True,
        scale=1.5,
        shared=1,
        dense_layers=1,
    ),
)

GPT_OSS = dataclasses.replace(
    QWEN3,
    model_type="gpt_oss",
    rms_norm_eps=1e-5,  # of vLLM, whatever the config says
    tied=False,
    qk_norm=None,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    windows=(16, None),
    rope=Rope(
        theta=1e4,
        scaling=YarnScaling(
            factor=4.0, original_max_positions=128, beta_fast=32.0, beta_slow=1.0, truncate=False
        ),
    ),
    intermediate_size=64,
    experts=Experts(
        count=4,
        per_token=2,
        intermediate_size=64,
        renormalise=True,
        biases=True,
        fused=True,
        clamp=ClampedGate(alpha=1.702, limit=7.0),
    ),
)


# A linear layer before one with attention; experts beside a shared one with a gate.
LINEAR = dataclasses.replace(
    EXPERTS,
    model_type="qwen3_next",
    norm_plus_one=True,
    output_gate=True,
    rope=Rope(theta=10000.0, share=0.5),
    linear=Linear(
        key_heads=1, value_heads=2, key_dim=128, value_dim=128, width=4, period=(True, False)
    ),
    experts=Experts(count=4, per_token=2, intermediate_size=64, renormalise=True, gated_shared=64),
)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
# A family decides which tensors are published and a dtype how their bytes are read: each once.
PAIRS = {
    "qwen3_tied": "float32",
    "qwen3": "bfloat16",
    "qwen2": "float16",
    "llama": "bfloat16",
    "mistral": "float32",
    "gemma3": "bfloat16",
    "phi3": "bfloat16",
}


def params(config: DecoderConfig, seed: int) -> Params:
    """Makes random f32 parameters with norms other than 1 and biases other than 0."""
    rng = np.random.default_rng(seed)

    def draw(part: ParamSpec) -> jax.Array:
        centre, scale = (1.0, 0.1) if part.scale is None else (0.0, part.scale or 0.1)
        return jnp.asarray(rng.normal(centre, scale, part.shape).astype(np.float32))

    return jax.tree.map(draw, dict(decoder(config).specs), is_leaf=spec.is_spec)


class ListSource:
    """A `WeightSource` over arrays in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, a.shape, a.dtype.name) for name, a in self.tensors.items()]

    def __iter__(self) -> Any:
        yield from self.tensors.items()


class Recorder:
    """A stand-in for `VllmServer` that reads and checks every payload and copies its tensors."""

    def __init__(self) -> None:
        self.root = Path()
        self.learner = LEARNER
        self.dtypes = ("", "", "")
        self.tensors: dict[str, bytes] = {}
        self.version = -1
        self.failure: Exception | None = None
        self.failed = ""  # message of the last version that it missed

    def fail(self, error: Exception) -> None:
        self.failed = str(error)

    def connect(
        self,
        *,
        root: str,
        wire: str,
        sampler: str,
        logits: str,
        learner: LearnerIdentity,
        blocks: str = "none",
    ) -> None:
        self.root = Path(root)
        self.learner = learner
        self.dtypes = (wire, sampler, logits)

    def update(self, payload_name: str, *, version: int, in_flight: InFlight) -> Timings:
        if self.failure is not None:
            raise self.failure
        tensors = read_payload(self.root, payload_name)
        self.tensors = {tensor.entry.name: tensor.data.tobytes() for tensor in tensors}
        self.version = version
        return Timings(load=1.0)


def write_payload(source: WeightSource, directory: Path, *, version: int) -> None:
    """Makes a directory with a payload of `LEARNER`."""
    directory.mkdir()
    file = plan_file(source.specs())
    data = np.zeros(file.nbytes, np.uint8)
    payload.write_tensors(source, file, data)
    data.tofile(directory / file.name)
    payload.write_manifest(directory, Manifest(version, LEARNER, file.entries))


def read_payload(root: Path, name: str) -> list[MappedTensor]:
    directory = payload.resolve(root, name)
    return payload.open_tensors(directory, manifest.read(directory).entries)
