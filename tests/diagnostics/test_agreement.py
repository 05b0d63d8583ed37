"""Agreement metrics, worked out by hand."""

import numpy as np
import pytest

from jaxrl.diagnostics.ratio.agreement import agreement_metrics, prefix_sums
from jaxrl.diagnostics.ratio.pictures import draw
from jaxrl.diagnostics.ratio.split import LogRatio
from jaxrl.losses.algebra import Clip


def ratio(beta, *, sequences=None, alpha=0.0) -> LogRatio:
    beta = np.array(beta, float)
    sampler = np.linspace(-3, -1, len(beta))
    where = np.zeros(len(beta), int) if sequences is None else np.array(sequences)
    shadow = sampler + alpha
    return LogRatio(shadow + beta, shadow, sampler, advantages=0 * beta, sequences=where)


def test_phantoms_have_either_sign():
    # ln 1.2 = .1823 and ln .8 = -.2231
    found = agreement_metrics(ratio([0.183, 0.19, 0.18, -0.22, -0.224, 0, 0, 0]), low=0.2, high=0.2)
    assert found["phantom_high"] == pytest.approx(2 / 8)
    assert found["phantom_low"] == pytest.approx(1 / 8)
    assert found["phantom"] == pytest.approx(3 / 16)


def test_moments_count_each_token_once():
    found = agreement_metrics(ratio([0.3, -0.1]), low=0.2, high=0.2)
    assert found["beta"] == pytest.approx(0.1)
    assert found["beta_std"] == pytest.approx(0.2)
    assert found["token_mult_error"] == pytest.approx((np.exp(0.3) + np.exp(0.1)) / 2)
    assert found["beta_decile_0"] == pytest.approx(0.3)  # the rarer token comes first
    assert not [name for name in found if name.startswith(("alpha", "clipped"))]


def test_prefix_sums_skip_shorter_sequences():
    found = prefix_sums(np.array([1, 2, 3, 10, 20, 5.0]), np.array([4, 4, 4, 6, 6, 9]))
    assert [(length, sums.tolist()) for length, sums in found] == [(1, [1, 10, 5]), (2, [3, 30])]


def test_sequence_spread_needs_eight_sequences():
    beta = [0.1, -0.1] * 7 + [0.3, 0.1]
    found = agreement_metrics(ratio(beta, sequences=np.repeat(np.arange(8), 2)), low=0.2, high=0.2)
    assert found["sequence_std_1"] == pytest.approx(np.std([0.1] * 7 + [0.3]))
    assert found["sequence_std_2"] == pytest.approx(np.std([0.0] * 7 + [0.4]))
    few = agreement_metrics(
        ratio(beta[:14], sequences=np.repeat(np.arange(7), 2)), low=0.2, high=0.2
    )
    assert "sequence_std_1" not in few


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_policies_is_drawn(count, tmp_path):
    sequences = np.repeat([0, 1], 6)
    both = {f"{i}": ratio([0.1 * i] * 12, sequences=sequences, alpha=0.2 * i) for i in range(count)}
    draw(both, title="t", clip=Clip(0.2, 0.2)).savefig(tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_a_clip_is_drawn_where_its_unit_is():
    def panels(unit):
        figure = draw({"a": ratio([0.1] * 4)}, title="t", clip=Clip(0.2, 0.25, unit))
        labels = [axes.get_legend_handles_labels()[1] for axes in figure.axes if axes.get_visible()]
        return ["clip" in one or "not clipped" in one for one in labels]

    # Of tokens; growth with length; by probability.
    assert panels("token") == [True, False, True]
    assert panels("product") == [False, True, False]
    assert panels("mean") == [False, False, False]
