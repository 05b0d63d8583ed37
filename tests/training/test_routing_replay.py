"""Routing replay: the experts that the sampler used, from its cache to the learner's gradient."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.builders.learner import build_learner
from jaxrl.config.training import Config
from jaxrl.core.batch import Minibatch, Rollout, from_json, to_json
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import MinibatchShape, pack, pack_minibatch, unpack
from jaxrl.core.precision import PRESETS
from jaxrl.environments.episodes.base import EpisodeLimits, Step
from jaxrl.environments.episodes.episode import EpisodeBuilder
from jaxrl.learner.policy import make_learner
from jaxrl.losses import objective, over_sampler, token_mean, unclipped
from jaxrl.models.logprobs import token_logprobs
from jaxrl.models.model import decoder
from jaxrl.sampling.base import Completion, SamplingParams
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import collect
from jaxrl.training.run import open_run
from tests import tiny
from tests.run_config import run_config

F32 = PRESETS["fp32"]
MODEL, PARAMS = decoder(tiny.MOE), tiny.params(config=tiny.MOE)
LAYERS, CHOSEN = 2, 2
PROMPTS = [np.arange(2, 2 + n, dtype=np.int32) * 7 % 62 for n in (3, 9)]
ROW = 48
LEARNER = make_learner(
    MODEL, objective(unclipped(over_sampler), token_mean), optimizer=optax.sgd(1.0), precision=F32
)
score, step = jax.jit(LEARNER.score), jax.jit(LEARNER.step)


def drawn(params) -> list[Rollout]:
    """The longest and the shortest answers of a batch that shrinks while it is drawn."""
    sampler = EmbeddedSampler(MODEL, params, precision=F32, record_experts=True)
    asked = SamplingParams(max_tokens=24, stop=((1,), (5,), (7,), (8,), (9,), (11,)), seed=3)
    found = sorted(sampler.sample(PROMPTS, asked, group_size=16), key=lambda c: len(c.tokens))
    found = found[:3] + found[-5:]
    assert len(found[0].tokens) < len(found[-5].tokens)
    return [
        Rollout(
            prompt=PROMPTS[c.prompt_index],
            completion=c.tokens,
            logprobs=c.logprobs,
            action_mask=np.ones(len(c.tokens), bool),
            version=c.versions,
            group=c.prompt_index,
            experts=c.experts,
        )
        for c in found
    ]


@pytest.fixture(scope="module")
def own() -> list[Rollout]:
    return drawn(PARAMS)


@pytest.fixture(scope="module")
def foreign() -> list[Rollout]:
    """Drawn by routers that have moved."""
    layers = PARAMS["layers"]
    noise = jax.random.normal(jax.random.key(1), layers["router"].shape) / 10
    moved = {**PARAMS, "layers": layers | {"router": layers["router"] + noise}}
    return drawn(moved)


def shape(packed) -> MinibatchShape:
    return MinibatchShape(row_length=ROW, rows_per_microbatch=2, max_rows=8, packed=packed)


def minibatch(rollouts, *, packed=True) -> Minibatch:
    advantages = list(np.random.default_rng(0).normal(size=len(rollouts)))
    return pack_minibatch(rollouts, advantages, shape=shape(packed))


def scores(rollouts, *, packed=True) -> list[np.ndarray]:
    found = np.asarray(score(PARAMS, minibatch(rollouts, packed=packed)))
    return unpack(found, rollouts, shape=shape(packed))


def forgotten(rollouts) -> list[Rollout]:
    """The same answers, and no experts known."""
    return [r._replace(experts=np.full_like(known(r), -1, dtype=np.int16)) for r in rollouts]


def known(rollout: Rollout) -> np.ndarray:
    assert rollout.experts is not None
    return rollout.experts


@functools.cache
def forward(*, replayed: bool):
    """One whole sequence through the decoder, by hand."""

    @jax.jit
    def run(tokens, experts) -> tuple[jax.Array, jax.Array]:
        assert MODEL.hidden_routed is not None
        ones = jnp.ones_like(tokens)
        places = jnp.arange(ROW, dtype=jnp.int32)[None]
        recorded = experts if replayed else None
        found = MODEL.hidden_routed(PARAMS, tokens, places, ones, precision=F32, recorded=recorded)
        head = MODEL.head(PARAMS)
        return found.experts, token_logprobs(
            found.hidden, head, tokens, jnp.ones(tokens.shape, bool), precision=F32
        )

    return run


def whole(rollout: Rollout, *, replayed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Experts [N, L, k] and log-probs [C] of a sequence with padding behind it."""
    tokens = np.zeros((1, ROW), np.int32)
    tokens[0, : rollout.length] = np.concatenate([rollout.prompt, rollout.completion])
    experts = np.zeros((1, ROW, LAYERS, CHOSEN), np.int32)
    experts[0, : rollout.length - 1] = known(rollout)
    used, logprobs = forward(replayed=replayed)(tokens, experts)
    answer = slice(len(rollout.prompt), rollout.length)
    return np.asarray(used)[0, : rollout.length - 1], np.asarray(logprobs)[0, answer]


def test_sampler_and_learner_route_alike(own):
    for one in own:
        assert known(one).shape == (one.length - 1, LAYERS, CHOSEN)
        assert known(one).dtype == np.uint8
        np.testing.assert_array_equal(known(one), whole(one, replayed=False)[0])
    for replayed, free in zip(scores(own), scores(forgotten(own)), strict=True):
        np.testing.assert_array_equal(replayed, free)
    without = [one._replace(experts=None) for one in own]
    assert minibatch(without).batch.experts is None
    for replayed, today in zip(scores(own), scores(without), strict=True):
        np.testing.assert_allclose(replayed, today, atol=1e-5)


PERIODS = dataclasses.replace(tiny.GPT_OSS, num_layers=5, windows=(5, None, 5, None, 5))


@pytest.mark.parametrize(
    "config", [dataclasses.replace(tiny.NEXT, num_layers=4), PERIODS], ids=["linear", "windows"]
)
def test_alternating_layers_are_replayed_in_order(config):
    model, params = decoder(config), tiny.params(config=config)
    sampler = EmbeddedSampler(model, params, precision=F32, record_experts=True)
    (one,) = sampler.sample(PROMPTS[:1], SamplingParams(max_tokens=9, seed=3), group_size=1)
    assert one.experts is not None
    tokens = np.concatenate([PROMPTS[0], one.tokens])[None, :-1]
    places = np.arange(tokens.size, dtype=np.int32)[None]

    @jax.jit
    def run(recorded):
        assert model.hidden_routed is not None
        inputs: Any = (params, tokens, places, np.ones_like(tokens))
        return model.hidden_routed(*inputs, precision=F32, recorded=recorded).experts

    unknown = np.full((1, tokens.size, config.num_layers, CHOSEN), -1, np.int32)
    np.testing.assert_array_equal(run(unknown)[0], one.experts)
    others = (one.experts[None].astype(np.int32) + 1) % 8
    np.testing.assert_array_equal(run(others), others)


def test_batch_holds_all_but_last_experts(own):
    batch = minibatch(own).batch
    assert batch.experts is not None
    there = np.asarray(batch.experts >= 0).all(axis=(2, 3))
    after = np.roll(np.asarray(batch.segments), -1, axis=1)
    last = (np.asarray(batch.segments) != after) | (np.arange(ROW) == ROW - 1)
    np.testing.assert_array_equal(there, (np.asarray(batch.segments) > 0) & ~last)
    longer = own[0]._replace(experts=np.zeros((own[0].length + 1, LAYERS, CHOSEN), np.uint8))
    with pytest.raises(ValueError, match="rollout 0: experts has"):
        pack([longer], [0.0], rows=[[0]], row_length=ROW)


def test_recorded_routing_is_replayed_packed_or_not(foreign):
    replayed, free = scores(foreign), scores(forgotten(foreign))
    alone = scores(foreign, packed=False)
    for i, one in enumerate(foreign):
        np.testing.assert_allclose(replayed[i], whole(one, replayed=True)[1], atol=1e-5)
        np.testing.assert_allclose(replayed[i], alone[i], atol=1e-5)
    differences = np.abs(np.concatenate(replayed) - np.concatenate(free))
    assert differences.max() > 1e-2


def test_router_learns_from_replayed_routing(foreign):
    batch, begin = minibatch(foreign), LEARNER.init(PARAMS)
    after, _ = step(begin, batch)
    gradient = jax.tree.map(lambda a, b: a - b, PARAMS["layers"], after.params["layers"])["router"]
    direction = gradient / jnp.linalg.norm(gradient)
    assert jnp.linalg.norm(gradient) > 1e-3

    def loss(shift: float) -> float:
        layers = PARAMS["layers"]
        moved = layers | {"router": layers["router"] + shift * direction}
        params = {**PARAMS, "layers": moved}
        _, metrics = step(dataclasses.replace(begin, params=params), batch)
        return to_floats(metrics)["loss"]

    slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert slope == pytest.approx(float(jnp.vdot(gradient, direction)), rel=1e-2)
    rows, _ = step(begin, minibatch(foreign, packed=False))
    unpacked = PARAMS["layers"]["router"] - rows.params["layers"]["router"]
    np.testing.assert_allclose(gradient, unpacked, atol=2e-5 * float(jnp.abs(unpacked).max()))


def test_pending_experts_survive_a_checkpoint(own):
    for one in (own[0], own[0]._replace(experts=None)):
        again = from_json(json.loads(json.dumps(to_json(one))))
        for name, value in one._asdict().items():
            np.testing.assert_array_equal(getattr(again, name), value)


def test_episode_keeps_its_tokens_experts():
    """Prompt 2, turn 2, observation 1, turn 2: the second turn's context was computed again."""
    builder = EpisodeBuilder(np.array([3, 4], np.int32), (0, 0))

    def turn(tokens: int, expert: int) -> Completion:
        ids, zeros = np.full(2, 9, np.int32), np.zeros(2, np.float32)
        experts = np.full((tokens - 1, LAYERS, CHOSEN), expert, np.uint8)
        return Completion(0, 0, ids, zeros, np.zeros(2, np.int32), "stop", experts)

    limits = EpisodeLimits(
        max_prompt_tokens=4, max_tokens=20, max_turns=3, vocab_size=64, timeout=1.0
    )
    builder.add_completion(turn(4, 1))
    assert builder.add_step(Step([8], 0.0, False), limits) is None
    builder.add_completion(turn(7, 2))
    found = builder.build("done", group=0).experts
    assert found is not None
    np.testing.assert_array_equal(found[:, 0, 0], [1, 1, 1, 2, 2, 2])


def config(directory: Path | str = "nothing", **changes: Any) -> Config:
    return run_config(directory, train__replay_routing="true", **changes)


def test_unavailable_replay_is_refused():
    with pytest.raises(ValueError, match=r"which vLLM's CPU build cannot"):
        config(**{"sampler.name": "vllm"})
    with pytest.raises(ValueError, match=r"replay_routing and critic\.trunk = 'shared'"):
        config(**{"critic.trunk": "shared", "loss.name": "ppo"})
    unused: Any = None
    with pytest.raises(
        ValueError, match=r"replay_routing = true, but nothing/model \(qwen3\) is a dense model"
    ):
        build_learner(config(), tiny.model(), objective=unused, layout=unused)
    with pytest.raises(ValueError, match="this one is dense"):
        EmbeddedSampler(tiny.model(), tiny.params(), precision=F32, record_experts=True)


REWARD = """
def characters(completion, example):
    return float(sum(map(ord, completion)) % 7)
"""


def test_rollouts_of_a_run_record_experts(tmp_path):
    tiny.write_checkpoint(tmp_path / "model", config=tiny.MOE)
    prompts = [json.dumps({"prompt": letter}) + "\n" for letter in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    (tmp_path / "reward.py").write_text(REWARD)
    changes = {
        "reward.path": f"{tmp_path}/reward.py:characters",
        "data.answer_key": "none",
        "train.train_batch": 3,
    }
    with open_run(config(tmp_path, **changes)) as (run, _, progress):
        found = collect(run.source, progress=progress, seconds={})
        progress.pending = found.batch
    again = Progress.from_json(json.loads(json.dumps(progress.to_json()))).pending
    assert len(again) == 12
    for one, other in zip(progress.pending, again, strict=True):
        assert known(one).shape == (one.length - 1, LAYERS, CHOSEN)
        np.testing.assert_array_equal(known(one), known(other))
