"""Turns that wait take the rows of completions that have ended."""

import jax
import numpy as np
import pytest

from jaxrl.core.precision import PRESETS
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams, Turn
from jaxrl.sampling.embedded import batch_decoding
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from tests import tiny

F32 = PRESETS["fp32"]
PARAMS = SamplingParams(max_tokens=1, temperature=0.8, stop=((1,), (5, 6)), seed=3)
BATCH = 16


def _turns(*, groups=12, longest=80):
    """Groups of four completions; many are short, a tenth is long."""
    rng = np.random.default_rng(0)
    limits = np.clip(np.exp(rng.normal(2.5, 1, 4 * groups)), 1, longest).astype(int)
    limits[rng.permutation(4 * groups)[: max(1, 4 * groups // 10)]] = longest
    prompts = [rng.integers(2, 64, rng.integers(2, 40)).astype(np.int32) for _ in range(groups)]
    return [Turn(prompts[i // 4], i // 4, i % 4, int(limit)) for i, limit in enumerate(limits)]


def _sampled(turns, *, config=tiny.CONFIG, max_batch=BATCH, layout=None, record_experts=False):
    model, params = decoder(config), tiny.params(config=config)
    if layout is not None:
        params = jax.device_put(params, layout.tree(model.specs))
    sampler = EmbeddedSampler(
        model,
        params,
        precision=F32,
        max_batch=max_batch,
        layout=layout,
        record_experts=record_experts,
    )
    found = list(sampler.sample_turns(turns, PARAMS))
    by_index = {(c.prompt_index, c.sample_index): c for c in found}
    assert len(by_index) == len(found) == len(turns)
    return by_index


def _assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for index, one in found.items():
        other = expected[index]
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.finish_reason == other.finish_reason
        if one.experts is not None or other.experts is not None:
            np.testing.assert_array_equal(one.experts, other.experts, strict=True)


@pytest.fixture
def decoded(monkeypatch):
    """Counts row-steps of decoding and turns put into rows that had ended."""
    counts = {"row_steps": 0, "refills": 0}
    segment, put = batch_decoding.decode_segment, batch_decoding.put_rows

    def decode_segment(weights, state, **settings):
        state, out = segment(weights, state, **settings)
        counts["row_steps"] += int(out.count) * len(state.rows.token)
        return state, out

    def put_rows(*arguments):
        counts["refills"] += 1
        return put(*arguments)

    monkeypatch.setattr(batch_decoding, "decode_segment", decode_segment)
    monkeypatch.setattr(batch_decoding, "put_rows", put_rows)
    return counts


@pytest.mark.parametrize(
    "config", [tiny.CONFIG, tiny.MOE, tiny.GEMMA, tiny.NEXT], ids=lambda c: c.model_type
)
def test_neither_order_nor_company_changes_a_completion(config, decoded):
    turns = _turns()
    experts = config.experts is not None
    found = _sampled(turns, config=config, record_experts=experts)
    assert decoded["refills"] > 3
    refills = decoded["refills"]
    _assert_equal(
        found, _sampled(turns, config=config, max_batch=len(turns), record_experts=experts)
    )
    assert decoded["refills"] == refills
    shuffled = [turns[i] for i in np.random.default_rng(1).permutation(len(turns))]
    _assert_equal(_sampled(shuffled, config=config, record_experts=experts), found)


def test_rows_that_have_ended_do_not_idle(decoded):
    turns = _turns(groups=40)
    tokens = sum(len(c.tokens) for c in _sampled(turns).values())
    refilled = decoded["row_steps"]
    decoded["row_steps"] = 0
    for i in range(0, len(turns), BATCH):
        _sampled(turns[i : i + BATCH])
    assert refilled < 1.5 * tokens
    assert refilled < 0.6 * decoded["row_steps"]


@pytest.mark.parametrize(
    ("rules", "axes"), [("data", {"data": 8}), ("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2})]
)
def test_mesh_equals_one_device(rules, axes, decoded):
    turns = _turns()
    expected = _sampled(turns, max_batch=len(turns))
    layout = Layout(make_mesh(**axes), RULES[rules])
    _assert_equal(_sampled(turns, layout=layout), expected)
    assert decoded["refills"] > 0


def test_short_completions_compile_no_more_programs(decoded):
    turns = _turns(longest=64)
    _assert_equal(_sampled(turns), _sampled(turns, max_batch=len(turns)))
    assert decoded["refills"] == 0


def test_long_context_enlarges_the_cache():
    short, long = np.arange(2, 5, dtype=np.int32), np.arange(2, 110, dtype=np.int32) % 60 + 2
    turns = [Turn(short, 0, j, 70 if j else 1) for j in range(BATCH)]
    turns += [Turn(long, 1, j, 10) for j in range(BATCH)]
    _assert_equal(_sampled(turns), _sampled(turns, max_batch=2 * BATCH))
