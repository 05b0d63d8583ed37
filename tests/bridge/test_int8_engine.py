"""A server in int8 serves what a learner with `blocks=int8` computes, at each publish."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.bridge.base import RefusedError
from jaxrl.bridge.shared_memory import SharedMemoryPublisher
from jaxrl.bridge.source import ParamsSource
from jaxrl.core.precision import Precision
from jaxrl.models.families import DecoderConfig
from jaxrl.models.model import decoder
from tests.bridge.cases import DTYPES, FAMILIES, params
from tests.bridge.engines import LINUX, ROOT, VLLM_PYTHON, ChildEngine, child_engine
from tests.bridge.test_engine import PROMPTS, checkpoint

CPU = Path("/proc/cpuinfo")
FLAGS = CPU.read_text().split() if CPU.exists() else []
AMX = "amx_tile" in FLAGS  # vLLM's loader of exports then refuses f32
EXACT = pytest.mark.skipif(
    not {"avx512_vnni", "amx_int8"} & {*FLAGS}, reason="oneDNN's sums of int8 are not exact here"
)
pytestmark = [LINUX, EXACT]


@pytest.fixture(scope="module")
def engine() -> Iterator[ChildEngine]:
    with child_engine() as running:
        yield running


def test_vllm_may_use_tiles(engine: ChildEngine) -> None:
    """Its attention in bf16 does not ask for them, and Linux ends a process that did not."""
    assert not engine.call("forbidden_tiles")


@pytest.mark.parametrize("dtype", ["bfloat16"] if AMX else ["float32", "bfloat16"])
def test_int8_is_that_of_compressed_tensors(
    engine: ChildEngine, tmp_path: Path, dtype: str
) -> None:
    """Weights that are quantised in the server, as it starts and at a publish, give the outputs of
    an exported checkpoint in vLLM's own format."""
    config, wire = FAMILIES["qwen2"], np.dtype(DTYPES[dtype])
    exported = tmp_path / "exported"
    huggingface.save(exported, params(config, 1), config, dtype=wire, blocks="int8")
    engine.open(exported, dtype)
    expected = engine.generate(PROMPTS)
    engine.open(checkpoint(config, 1, tmp_path / "new", wire), dtype, quantization="jaxrl_int8")
    assert engine.generate(PROMPTS) == expected
    engine.open(checkpoint(config, 0, tmp_path / "old", wire), dtype, quantization="jaxrl_int8")
    assert engine.generate(PROMPTS) != expected
    settings: dict[str, Any] = {"wire": wire, "sampler": wire}
    with pytest.raises(RefusedError, match="computes with blocks=int8 and the learner with bl"):
        SharedMemoryPublisher([engine], **settings)
    specs = decoder(config).specs
    with SharedMemoryPublisher([engine], **settings, blocks="int8") as publisher:
        for version in range(2):
            source = ParamsSource(params(config, 1), specs, dtype=wire)
            publisher.publish(source, version=version)
            assert engine.generate(PROMPTS) == expected
    assert engine.call("loaded_modules") == []


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "fp32"), ("float16", "fp16_master")])
def test_int8_is_the_learners(
    engine: ChildEngine, tmp_path: Path, dtype: str, precision: str
) -> None:
    """Also in the dtypes for which vLLM's kernel on tiles has no activations. In f16 the engine's
    other roundings move activations to other integers."""
    config = FAMILIES["qwen2"]
    written = checkpoint(config, 1, tmp_path / "model", np.dtype(DTYPES[dtype]))
    engine.open(written, dtype, quantization="jaxrl_int8")
    found = engine.generate(PROMPTS)
    alike, plain = (differences(config, precision + p, found) for p in (",blocks=int8", ""))
    assert np.median(alike) < np.median(plain)
    if dtype == "float32":
        assert np.median(alike) < 1e-5 < 1e-3 < np.median(plain)


def test_a_kernel_with_wrong_sums_is_known() -> None:
    code = "from jaxrl.bridge.in_vllm.int8 import sums_are_exact; print(sums_are_exact())"
    done = subprocess.run(
        [VLLM_PYTHON, "-c", code],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1:] == ["False"], done.stderr


def differences(config: DecoderConfig, precision: str, outputs: list) -> np.ndarray:
    """Compares a learner's log-probs of the outputs for `PROMPTS` with the engine's; returns the
    sizes of the differences."""
    model, weights, found = decoder(config), params(config, 1), []
    for prompt, (tokens, logprobs) in zip(PROMPTS, outputs, strict=True):
        ids = jnp.array([prompt + tokens])
        places, ones = jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
        hidden = model.hidden(weights, ids, places, ones, precision=Precision.parse(precision))
        own = jax.nn.log_softmax(hidden @ model.unembedding(weights).T)[0, len(prompt) - 1 : -1]
        found.append(np.abs(own[np.arange(len(tokens)), np.array(tokens)] - np.array(logprobs)))
    return np.concatenate(found)
