"""Layers are divided into scans: each layer once, in order, and one kind to a group."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxrl.huggingface.config.convert import from_hf_config
from jaxrl.models.components import Experts
from jaxrl.models.families import DecoderConfig
from jaxrl.models.layers import in_order, scan_layers
from jaxrl.models.model import _replayed
from jaxrl.models.parameters import param_specs
from jaxrl.models.periods import divide
from jaxrl.models.rope import Rope
from jaxrl.models.spec import flatten
from tests import tiny

MODELS = Path("configs/models")
EXPERTS = Experts(count=4, per_token=2, intermediate_size=8, renormalise=True)


def of_windows(*windows: int | None, **settings) -> DecoderConfig:
    return dataclasses.replace(
        tiny.CONFIG, windows=windows, num_layers=len(windows), ropes=(), **settings
    )


def published(name: str) -> DecoderConfig:
    return from_hf_config(json.loads((MODELS / name / "config.json").read_text()))


def groups(config: DecoderConfig) -> list[list[tuple[str, list[int]]]]:
    return [[(group.name, list(group.layers)) for group in scan] for scan in config.scans]


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 2), max_size=6),
    st.integers(1, 5),
    st.lists(st.integers(0, 2), max_size=6),
)
def test_spans_cover_the_layers_in_order(irregular, period, count, rest):
    layers = irregular + period * count + rest
    found = divide(layers)
    assert found == divide([f"kind {one}" for one in layers])
    spelled = [layers[one.first : one.first + one.period] * one.count for one in found]
    assert list(itertools.chain(*spelled)) == layers
    assert [one.first for one in found] == [0, *(one.end for one in found)][: len(found)]
    assert all(one.count > 1 or one.period == 1 for one in found)
    runs = sum(1 for _ in itertools.groupby(layers))
    assert sum(one.period for one in found) <= min(runs, len(irregular) + len(period) + len(rest))


@given(
    st.lists(st.sampled_from([None, 3, 5]), min_size=1, max_size=12),
    st.lists(st.sampled_from([None, Rope(), Rope(theta=5.0)]), min_size=12, max_size=12),
    st.integers(0, 2),
)
def test_groups_partition_layers_by_kind(windows, ropes, dense):
    experts = dataclasses.replace(EXPERTS, dense_layers=dense)
    config = of_windows(*windows, experts=experts)
    config = dataclasses.replace(config, ropes=tuple(ropes[: len(windows)]))
    order = [
        i
        for scan in config.scans
        for step in zip(*(g.layers for g in scan), strict=True)
        for i in step
    ]
    assert order == list(range(config.num_layers))
    for group in config.groups:
        assert {config.kinds[i] for i in group.layers} == {group.kind}
        assert {i >= dense for i in group.layers} == {group.routed}
    names = [name for one in flatten(param_specs(config)).values() for name in one.hf_names()]
    assert len(set(names)) == len(names)
    places = sorted(place for group in config.groups for place in config.cache_places(group))
    assert places == list(range(config.num_layers))


@pytest.mark.parametrize("layers", [jnp.array, tuple], ids=["stacked", "apart"])
def test_layer_order_is_kept(layers):
    config = of_windows(None, 5, None, 5, None, 5, 3, experts=EXPERTS)
    assert [len(scan) for scan in config.scans] == [2, 1]
    params = {group.name: layers(group.layers) for group in config.groups}
    recorded = jnp.arange(config.num_layers)  # experts to replay, one number for each layer

    def layer_of(group, count, index, replay):
        return count + 1, {"index": index, "count": count, "replay": replay}

    _, found = scan_layers(
        layer_of,
        jnp.int32(0),
        params,
        config,
        inputs=lambda group: (_replayed(recorded, group, config),),
    )
    for kept in in_order(found).values():
        np.testing.assert_array_equal(kept, range(config.num_layers))
    assert in_order([[(group, None) for group in scan] for scan in config.scans]) is None


def test_equal_layers_form_one_group():
    assert groups(of_windows(5, 5, 5)) == [[("layers", [0, 1, 2])]]
    experts = dataclasses.replace(EXPERTS, dense_layers=2)
    found = groups(of_windows(*[None] * 5, experts=experts))
    assert found == [[("dense_layers", [0, 1])], [("layers", [2, 3, 4])]]


def test_periods_of_published_models():
    gemma = published("gemma3_1b")
    assert gemma.num_layers == 26
    repeated = [f"sliding_{i}" for i in range(5)] + ["full_5"]
    assert groups(gemma) == [
        [(name, list(range(i, 24, 6))) for i, name in enumerate(repeated)],
        [("sliding_24", [24, 25])],
    ]
    assert groups(published("gpt_oss_20b")) == [
        [("sliding_0", list(range(0, 24, 2))), ("full_1", list(range(1, 24, 2)))]
    ]
    names = [[name for name, _ in scan] for scan in groups(published("smollm3_3b"))]
    assert names == [["full_0", "full_1", "full_2", "no_rope_3"]]
    assert [len(scan) for scan in groups(published("olmo3_7b"))] == [4]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None, None, 5, 5, 5], [{"full_0": [0, 1]}, {"sliding_2": [2, 3, 4]}]),
        ([5, None, 5, None, 5], [{"sliding_0": [0, 2], "full_1": [1, 3]}, {"sliding_4": [4]}]),
        ([5, 5, None, 5], [{"sliding_0": [0, 1]}, {"full_2": [2]}, {"sliding_3": [3]}]),
    ],
    ids=["runs", "a period and a rest", "irregular"],
)
def test_runs_periods_and_irregular_layers(windows, expected):
    assert [dict(scan) for scan in groups(of_windows(*windows))] == expected
