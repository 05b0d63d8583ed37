"""Memory outside the step, against a real sampler and by hand."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from jaxrl.builders.layout import sampler_layout
from jaxrl.commands.plan.resident import KVCache, ResidentMemory, on_one, resident_memory
from jaxrl.commands.plan.step import make_step
from jaxrl.commands.plan.topology import open_topology
from jaxrl.huggingface.config import convert
from jaxrl.models import spec
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded import batch_decoding
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from tests import tiny
from tests.commands.plan.configs import make_config


def counted(directory, **changes) -> ResidentMemory:
    return resident_memory(make_step(make_config(directory, **changes), open_topology("cpu:8")))


COMPLETIONS = {
    "sampling__max_tokens": "120",
    "train__train_batch": "2",
    "train__group_size": "8",
    "train__microbatch_tokens": "136",
}


def test_weights_and_cache_match_a_real_sampler(tmp_path, monkeypatch):
    held, grow = [], batch_decoding.grow_cache

    def watched(rows, **settings):
        grown = grow(rows, **settings)
        held.append((on_one(rows.cache), on_one(grown.cache)))
        return grown

    monkeypatch.setattr(batch_decoding, "grow_cache", watched)
    config = make_config(tmp_path, **COMPLETIONS)
    step = make_step(config, open_topology("cpu:8"))
    found = resident_memory(step)
    model = decoder(dataclasses.replace(tiny.CONFIG, max_positions=256))
    own = sampler_layout(config.sampler, step.layout, model)
    sampler = EmbeddedSampler(
        model._replace(local=own.local),
        jax.device_put(tiny.params(), step.layout.tree(model.specs)),
        precision=step.config.precision,
        max_batch=config.sampling.max_batch,
        layout=own,
    )
    assert found.sampler == on_one(sampler._weights.params)
    prompts = [np.arange(2, 18, dtype=np.int32), np.arange(3, 19, dtype=np.int32)]
    asked = SamplingParams(max_tokens=120, temperature=1.0, stop=(), seed=0)
    assert len(list(sampler.sample(prompts, asked, group_size=8))) == 16
    cache = found.cache
    assert (cache.rows, cache.slots) == (16, 192)
    assert (cache.moving, cache.size) == held[-1]


def test_replicated_weights(tmp_path):
    cut, whole = (
        counted(tmp_path, **COMPLETIONS),
        counted(tmp_path, **COMPLETIONS, sampler__tensor=1),
    )
    assert whole.sampler == 2 * sum(x.size for x in jax.tree.leaves(tiny.params()))
    assert whole.published > whole.sampler  # sharded like the learner's, in transfer
    assert whole.published - whole.sampler == cut.published - cut.sampler
    assert whole.cache.size == cut.cache.size  # rows are sharded in place of heads


@pytest.mark.parametrize("form", ["expanded", "sampler"])
def test_the_cache_of_latent_attention(form, tmp_path):
    directory, latent = tmp_path / "model", tiny.DEEPSEEK.latent
    directory.mkdir()
    content = convert.to_hf_config(tiny.DEEPSEEK, dtype="float32")
    (directory / "config.json").write_text(json.dumps(content))
    changes = {"model__path": str(directory), "precision": f"bf16_master,latent={form}"}
    changes |= {"sampler__tensor": 2, "sampler__expert": 1}
    cache = counted(tmp_path, **COMPLETIONS, **changes).cache
    numbers = 4 // 2 * (tiny.DEEPSEEK.head_dim + latent.value_dim)  # heads over two devices
    if form == "sampler":
        numbers = latent.kv_rank + latent.rope_dim
    assert cache.size == tiny.DEEPSEEK.num_layers * 16 // 4 * 192 * numbers * 2


def test_peaks_of_the_phases():
    found = ResidentMemory(
        state=10,
        sampler=2,
        reference=1,
        reward_model=3,
        critic=4,
        published=5,
        cache=KVCache(rows=8, slots=64, size=20, moving=7),
        overlapped=False,
    )
    assert found.phases(18) == {"learning": 28, "sampling": 47, "publishing": 25}
    compiled = dataclasses.replace(found, cache=dataclasses.replace(found.cache, decoding=9))
    assert compiled.phases(18)["sampling"] == 49
    both = dataclasses.replace(found, overlapped=True)
    assert both.phases(18) == {"learning": 55, "sampling": 47, "publishing": 52}
    served = dataclasses.replace(found, cache=None, published=0)
    assert served.phases(18) == {"learning": 28}


def test_models_beside_the_policy(tmp_path):
    reward_model = tmp_path / "reward_model"
    reward_model.mkdir()
    sizes = dataclasses.replace(tiny.CONFIG, num_layers=4, scored=True)
    (reward_model / "config.json").write_text(
        json.dumps(convert.to_hf_config(sizes, dtype="float32"))
    )

    def count(config, parts=8) -> float:
        """Counts parameters on one of 8 devices: norms and a scorer's head are sharded less."""
        return sum(
            math.prod(one.shape) / (1 if "norm" in one.axes else 4 if path == "score" else parts)
            for path, one in spec.flatten(decoder(config).specs).items()
        )

    policy, critic = count(tiny.CONFIG), count(dataclasses.replace(tiny.CONFIG, scored=True))
    both = {"precision": "bf16_master", "reward__kl": "0.1", "reward__model": str(reward_model)}
    found = counted(tmp_path, loss__name="ppo", **both)
    own = 2 * count(tiny.CONFIG, parts=2)  # by the model's two heads of keys
    assert (found.reference, found.sampler) == (2 * policy, own)
    assert found.published == own + 2 * policy
    assert found.reward_model == 2 * count(sizes)
    assert found.critic == pytest.approx(3 * 4 * critic, abs=64)
    assert found.state == pytest.approx(3 * 4 * policy, abs=64)
    served = counted(tmp_path, sampler__name="vllm", **both)
    assert (served.sampler, served.published, served.critic, served.cache) == (0, 0, 0, None)
    assert served.reference == found.reference
    adapters = counted(tmp_path, lora__rank="8", lora__targets='["q_proj"]', **both)
    # Layers, rank, in and out; A is sharded over fsdp = 4 only, B over tensor.
    assert adapters.reference == 2 * (2 * 8 * 32 / 4 + 2 * 32 * 8 / 2)
    assert (adapters.sampler, adapters.published) == (own, own + 2 * policy)


def test_models_on_devices_of_their_own(tmp_path):
    """Whole weights, since each of these meshes has replicas alone; the policy's has none of them.
    Its own part is as without the others."""
    changes = {"precision": "bf16_master", "reward__kl": "0.1", "loss__name": "ppo"}
    changes |= {"mesh__fsdp": 2, "mesh__tensor": 2, "sampler__devices": 1}
    own = {"critic_mesh__data": 2, "reference_mesh__data": 1}
    found = counted(tmp_path, **changes, **own)
    weights = sum(x.size for x in jax.tree.leaves(tiny.params()))
    assert found.apart["reference_mesh"] == 2 * weights
    head = tiny.CONFIG.hidden_size
    assert found.apart["critic_mesh"] == pytest.approx(3 * 4 * (weights + head), abs=64)
    assert (found.reference, found.critic) == (0, 0)
    server = {"sampler__devices": 4, "reference__server": "http://127.0.0.1:8001"}
    assert counted(tmp_path, **changes | server).reference == 0


def test_the_engines_weights_and_cache_by_hand(tmp_path):
    changes = {**COMPLETIONS, "sampler__name": "vllm_tpu"}
    found = counted(tmp_path, **changes)
    specs = spec.flatten(decoder(tiny.CONFIG).specs)
    norms = sum(math.prod(one.shape) for one in specs.values() if len(one.tensor_shape) == 1)
    total = sum(math.prod(one.shape) for one in specs.values())
    # Two heads of keys and values: two of the eight devices.
    assert found.sampler == 2 * (norms + (total - norms) / 2)
    longest = make_config(tmp_path, **changes).longest_sequence
    token = 2 * 2 * 2 * 8 * 2  # keys and values, layers, heads, dimensions, bytes
    assert found.engine_cache == 64 * longest * token / 2
    assert found.cache is None
    largest = 64 * 32  # the embedding, in two dtypes of two bytes
    assert found.published == largest * 4
    phases = found.phases(1000.0)
    assert phases["learning"] == 1000 + found.always + found.engine_cache
    assert phases["sampling"] == found.state + found.always + found.engine_cache
    assert phases["publishing"] == found.state + found.always + found.published
    fewer = counted(tmp_path, **changes, sampler__kv_cache_bytes=str(16 * token))
    assert fewer.engine_cache == 16 * token / 2
    apart = counted(tmp_path, **changes | {"mesh__fsdp": "2", "sampler__devices": "4"})
    assert (apart.sampler, apart.engine_cache) == (0, 0)
