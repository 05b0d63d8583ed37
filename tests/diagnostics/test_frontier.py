"""The frontier against a comparison of all pairs; candidates are policies that can be computed."""

import itertools

import numpy as np
import pytest

from jaxrl.commands.doctor.budget import _advice
from jaxrl.core.precision import PRESETS, Precision, check_products
from jaxrl.diagnostics.ratio.frontier import Choice, candidates, cheapest, draw_frontier, frontier


@pytest.mark.parametrize("seed", range(5))
def test_frontier_holds_what_nothing_beats(seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(1, 8, (12, 2)).tolist()  # with ties
    choices = [Choice(str(i), beta, cost) for i, (beta, cost) in enumerate(numbers)]

    def beats(a: Choice, b: Choice) -> bool:
        return a.beta <= b.beta and a.cost <= b.cost and (a.beta, a.cost) != (b.beta, b.cost)

    kept = frontier(choices)
    expected = {(b.beta, b.cost) for b in choices if not any(beats(a, b) for a in choices)}
    assert {(one.beta, one.cost) for one in kept} == expected
    assert len(kept) == len(expected)
    assert all(a.cost < b.cost for a, b in itertools.pairwise(kept))
    for bound in (0.5, 3, 5, 9):
        under = [one.cost for one in choices if one.beta <= bound]
        best = cheapest(choices, bound=bound)
        assert (best.cost if best else None) == min(under, default=None)


def test_a_policy_that_overflows_beats_nothing():
    """The cheapest one of f16 gives NaN on a model whose activations it cannot hold."""
    others = [Choice("b", 0.1, 2.0), Choice("c", 0.05, 3.0)]
    choices = [Choice("a", float("nan"), 1.0), *others]
    assert frontier(choices) == others
    assert cheapest(choices, bound=0.07) == others[1]
    assert _advice(choices, None, bound=0.01).startswith("No beta stays under 0.01 nats. c has")
    draw_frontier(choices, bound=0.07, cost="seconds")


def test_candidates_can_be_computed_and_differ():
    for platform in ("cpu", "gpu", "tpu"):
        found = [Precision.parse(text) for text in candidates(platform)]
        assert len(set(found)) == len(found)
        assert set(PRESETS.values()) <= set(found)
        for precision in found:
            check_products(precision, platform)
    assert "fp32,products=bf16x3" in candidates("tpu")
    assert "fp32,products=bf16x3" not in candidates("cpu") + candidates("tpu", devices=4)
    own = {Precision.parse(text) for text in candidates("cpu")}
    more = {Precision.parse(text) for text in candidates("cpu", blocks=("e4m3", "int8"))}
    assert own == {one for one in more if one.blocks == "none"}
    fixed = {Precision.parse(text) for text in candidates("cpu", fixed_sums=True)} - own
    presets = ("fp32", "bf16", "bf16_master", "fp16_master")  # learner and sampler compute alike
    assert fixed == {Precision.parse(f"{name},sums=fixed") for name in presets}
    # A number of E4M3 times its factor is not exact in f16.
    assert Precision.parse("fp16_master,blocks=int8") in more
    assert {one.blocks for one in more if one.compute == "float16"} == {"none", "int8"}
    assert {"bf16_master,activations=f32", "bf16_master,logits=bf16"} <= set(candidates("cpu"))
