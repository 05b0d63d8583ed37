"""A service that samples from a vLLM server: each client has the weights that it was made with."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.bridge import new_learner
from jaxrl.core import cast
from jaxrl.huggingface import Checkpoint
from jaxrl.models import init, lora
from jaxrl.sampling import EmbeddedSampler, SamplingParams, Turn
from jaxrl.service.pool import ALPHA, Base
from jaxrl.service.sampling import BASE, Request, Samplers
from jaxrl.service.servers import Servers
from jaxrl.sharding import PRESETS, Layout, make_mesh
from tests import tiny
from tests.bridge.test_int8_engine import EXACT as INT8
from tests.sampling.serving import FP32, MODEL, SERVED, started, write_material
from tests.service.drawing import drawn

ADAPTERS = A, B = "tinker://a", "tinker://b"


@pytest.mark.parametrize("blocks", ["none", pytest.param("int8", marks=INT8)])
def test_samples_of_a_server_have_the_weights_that_they_name(tmp_path, blocks):
    """In int8 the base's matrices are rounded, and adapters beside them are not."""
    precision = dataclasses.replace(FP32, blocks=blocks)
    write_material(tmp_path)
    base = cast(tiny.params(config=SERVED), FP32.wire)
    layout = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["all"])
    specs = lora.adapter_specs(MODEL.specs, rank=4, targets=("*_proj",))
    weights = {BASE: base, "all": cast(tiny.params(1, config=SERVED), FP32.wire)}
    for seed, name in enumerate(ADAPTERS):
        rng = np.random.default_rng(seed)
        zeros = init(specs, jax.random.key(0), dtype=FP32.wire)
        noise = jax.tree.map(lambda x, r=rng: np.float32(0.3 * r.standard_normal(x.shape)), zeros)
        weights[name] = lora.Adapted(noise, base, ALPHA)
        (tmp_path / name[-1]).mkdir()
        huggingface.save_adapter(
            tmp_path / name[-1],
            noise,
            specs=lora.Adapted(specs, MODEL.specs, ALPHA),
            base="base",
            dtype=FP32.wire,
        )
    with started(tmp_path, rank=8, blocks=blocks) as server:
        backend = Servers(
            Base(MODEL, base, precision, layout),
            [server.url],
            key=server.api_key,
            learner=new_learner(f"service of {tmp_path}"),
            directory=lambda name: tmp_path / name[-1],
        )
        backend.load(base)
        samplers = Samplers(
            Base(MODEL, base, precision, layout),
            tokenizer=Checkpoint(tmp_path / "model").tokenizer,
            end_ids=(1,),
            load=None,
            backend=backend,
        )
        for name in (*ADAPTERS, "all"):
            samplers.keep(name, weights[name])
        prompt = np.arange(3, 9, dtype=np.int32)
        asked = [
            Request(name, prompt, 2, 6, 0.0, 1.0, -1, (), seed, whole=whole)
            for seed, (name, whole) in enumerate(
                [(BASE, ""), (A, ""), (B, ""), ("all", "all"), (A, "")]
            )
        ]
        for batch in (asked[:3], asked[3:4], asked[4:]):
            for place, answer in drawn(samplers, batch):
                one = batch[place]
                own = EmbeddedSampler(MODEL, lora.attach(weights[one.weights]), precision=precision)
                turn = Turn(prompt, 0, 0, one.max_tokens)
                (expected,) = own.sample_turns([turn], SamplingParams(max_tokens=6, temperature=0))
                for sample in answer.samples:
                    np.testing.assert_array_equal(sample.tokens, expected.tokens)
                    np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=1e-4)
        backend.close()
