"""What a plan counts besides the step, against what a sampler really takes and by hand."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from jaxrl.commands.plan.resident import Besides, Cache, besides, on_one
from jaxrl.commands.plan.step import make_step
from jaxrl.commands.plan.topology import open_topology
from jaxrl.models import families, spec
from jaxrl.models.decoder import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded import batch_decoding
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from tests import tiny
from tests.commands.plan.configs import make_config


def counted(directory, **changes) -> Besides:
    config = make_config(directory, **changes)
    return besides(config, make_step(config, open_topology("cpu:8")))


ANSWERS = {
    "sampling__max_tokens": "120",
    "train__train_batch": "2",
    "train__group_size": "8",
    "train__microbatch_tokens": "136",
}


def test_the_samplers_weights_and_cache_are_what_it_really_holds(tmp_path, monkeypatch):
    held, grow = [], batch_decoding.grow_cache

    def watched(rows, **settings):
        grown = grow(rows, **settings)
        held.append((on_one(rows.cache), on_one(grown.cache)))
        return grown

    monkeypatch.setattr(batch_decoding, "grow_cache", watched)
    config = make_config(tmp_path, **ANSWERS)
    step = make_step(config, open_topology("cpu:8"))
    found = besides(config, step)
    model = decoder(dataclasses.replace(tiny.CONFIG, max_positions=256))
    sampler = EmbeddedSampler(
        model._replace(local=step.layout.local),
        jax.device_put(tiny.params(), step.layout.tree(model.specs)),
        precision=step.policy,
        max_batch=config.sampling.max_batch,
        layout=step.layout,
    )
    assert found.sampler == on_one(sampler._weights.params)
    prompts = [np.arange(2, 18, dtype=np.int32), np.arange(3, 19, dtype=np.int32)]
    asked = SamplingParams(max_tokens=120, temperature=1.0, stop=(), seed=0)
    assert len(list(sampler.sample(prompts, asked, group_size=8))) == 16
    cache = found.cache
    assert (cache.rows, cache.slots) == (16, 160)
    assert (cache.moving, cache.size) == held[-1]


def test_whole_weights_on_every_device(tmp_path):
    cut, whole = counted(tmp_path, **ANSWERS), counted(tmp_path, **ANSWERS, sampler__rules="data")
    assert whole.sampler == 2 * sum(x.size for x in jax.tree.leaves(tiny.params()))
    assert whole.published == whole.sampler + cut.sampler  # cut as the learner's, on its way
    assert whole.cache.size == 2 * cut.cache.size  # heads are not cut


def test_what_the_phases_of_a_run_hold():
    found = Besides(
        state=10,
        sampler=2,
        reference=1,
        reward_model=3,
        critic=4,
        published=5,
        cache=Cache(rows=8, slots=64, size=20, moving=7),
        at_once=False,
    )
    assert found.phases(18) == {"learning": 28, "sampling": 47, "publishing": 25}
    both = dataclasses.replace(found, at_once=True)
    assert both.phases(18) == {"learning": 55, "sampling": 47, "publishing": 52}
    served = dataclasses.replace(found, cache=None, published=0)
    assert served.phases(18) == {"learning": 28}


def test_models_that_lie_beside_the_policy(tmp_path):
    judge = tmp_path / "judge"
    judge.mkdir()
    sizes = dataclasses.replace(tiny.CONFIG, num_layers=4, scored=True)
    (judge / "config.json").write_text(json.dumps(families.to_hf_config(sizes, dtype="float32")))

    def count(config) -> float:
        """Numbers on one of 8 devices: norms and the head of a scorer, a row, are cut less."""
        return sum(
            math.prod(one.shape) / (1 if "norm" in one.axes else 4 if path == "score" else 8)
            for path, one in spec.flatten(decoder(config).specs).items()
        )

    policy, critic = count(tiny.CONFIG), count(dataclasses.replace(tiny.CONFIG, scored=True))
    both = {"precision": "bf16_master", "reward__kl": "0.1", "reward__model": str(judge)}
    found = counted(tmp_path, loss__name="ppo", **both)
    assert found.reference == found.sampler == found.published == 2 * policy
    assert found.reward_model == 2 * count(sizes)
    assert found.critic == pytest.approx(3 * 4 * critic, abs=64)
    assert found.state == pytest.approx(3 * 4 * policy, abs=64)
    served = counted(tmp_path, sampler__name="vllm", **both)
    assert (served.sampler, served.published, served.critic, served.cache) == (0, 0, 0, None)
    assert served.reference == found.reference
    adapters = counted(tmp_path, lora__rank="8", lora__targets='["q_proj"]', **both)
    # Layers, rank, in and out; the first matrix is cut over fsdp = 4 alone, the other over tensor.
    assert adapters.reference == 2 * (2 * 8 * 32 / 4 + 2 * 32 * 8 / 2)
    assert adapters.published == 2 * adapters.sampler == 4 * policy
