"""Metrics of the alpha/beta split, worked out by hand."""

import numpy as np
import pytest

from jaxrl.core.packing import MinibatchShape
from jaxrl.diagnostics.ratio.shape_noise import shape_noise
from jaxrl.diagnostics.ratio.split import LogRatio, Split, moments, split_log_ratio
from tests import tiny


def tokens(alpha, beta, *, advantages, sampler=None, sequences=None) -> LogRatio:
    alpha, beta = np.array(alpha, float), np.array(beta, float)
    sampler = np.full(len(alpha), -1.0) if sampler is None else np.array(sampler, float)
    return LogRatio(
        learner=sampler + alpha + beta,
        shadow=sampler + alpha,
        sampler=sampler,
        advantages=np.array(advantages, float),
        sequences=np.zeros(len(alpha), int) if sequences is None else np.array(sequences),
    )


def test_alpha_plus_beta_is_the_log_ratio():
    rng = np.random.default_rng(0)
    one = LogRatio(*rng.normal(-2, 0.3, (3, 50)), rng.normal(size=50), np.repeat(np.arange(5), 10))
    found = split_log_ratio(one, low=0.2, high=0.2)
    assert found["alpha"] + found["beta"] == pytest.approx(-found["kl"], abs=1e-12)


def test_phantom_is_a_clip_beyond_alpha():
    # ln 1.2 = .1823 and ln .8 = -.2231; the advantage decides which side is clipped.
    cases = [  # alpha, beta, advantage: clipped?, phantom?
        (0.0, 0.183, 1, True, True),
        (0.0, 0.182, 1, False, False),
        (0.0, -0.224, -1, True, True),
        (0.0, -0.223, -1, False, False),
        (0.0, 0.5, -1, False, False),
        (0.0, -0.5, 1, False, False),
        (0.2, 0.0, 1, True, False),
        (0.2, 0.1, 1, True, False),
        (0.2, -0.1, 1, False, False),  # hides a clip; is none
        (-0.1, -0.2, -1, True, True),
        (0.3, 0.3, 0, False, False),
    ]
    alpha, beta, advantages, clipped, phantom = zip(*cases, strict=True)
    found = split_log_ratio(tokens(alpha, beta, advantages=advantages), low=0.2, high=0.2)
    assert found["clipped"] == pytest.approx(sum(clipped) / 11)
    assert found["clipped_low"] == pytest.approx(2 / 11)
    assert found["clipped_high"] == pytest.approx(3 / 11)
    assert found["phantom"] == pytest.approx(sum(phantom) / 11)
    assert found["phantom_share"] == pytest.approx(3 / 5)


def test_without_beta_no_clip_is_a_phantom():
    found = split_log_ratio(
        tokens([0.5, -0.5, 0.1], [0, 0, 0], advantages=[1, -1, 1]), low=0.2, high=0.2
    )
    assert found["clipped"] == pytest.approx(2 / 3)
    assert found["phantom"] == found["phantom_share"] == found["beta_std"] == 0
    assert found["beta_advantage"] == 0


def test_weights_of_gradients_with_and_without_beta():
    """e^(alpha + beta) A beside e^alpha A: (2, 3) and (1, 3) for A = (1, -3), beta = (ln 2, 0)."""
    ln2 = np.log(2)
    found = split_log_ratio(tokens([0, 0], [ln2, 0], advantages=[1, -3]), low=0.2, high=0.2)
    assert found["weight_difference"] == pytest.approx(1 / np.sqrt(10))
    assert found["weight_correlation"] == pytest.approx(1)  # two points lie on a line
    three = tokens([0, 0, ln2], [0, ln2, -ln2], advantages=[1, 1, 2])
    found = split_log_ratio(three, low=0.2, high=0.2)
    assert found["weight_correlation"] == pytest.approx(np.corrcoef([1, 2, 2], [1, 1, 4])[0, 1])
    assert found["weight_difference"] == pytest.approx(np.sqrt(5 / 18))
    same = split_log_ratio(tokens([0.3, 0.1], [0, 0], advantages=[1, -1]), low=0.2, high=0.2)
    assert (same["weight_difference"], same["weight_correlation"]) == (0, pytest.approx(1))


def test_moments_and_correlation_equal_numpy():
    found = split_log_ratio(
        tokens([0.1, 0.3], [-0.02, 0.04], advantages=[-1, 2], sampler=[-1, -2]), low=0.2, high=0.2
    )
    assert found["alpha"] == pytest.approx(0.2)
    assert found["alpha_std"] == pytest.approx(0.1)
    assert found["beta"] == pytest.approx(0.01)
    assert found["beta_std"] == pytest.approx(0.03)
    assert found["beta_p99"] == pytest.approx(0.0398)
    assert found["beta_advantage"] == pytest.approx(1.0)
    # The rarer token, sampled at e^-2, comes first.
    assert found["beta_decile_0"] == pytest.approx(0.04)
    assert found["beta_decile_1"] == pytest.approx(0.02)


def test_divergences_equal_a_computation_by_hand():
    ln2 = np.log(2)
    found = split_log_ratio(
        tokens([ln2, 0, -ln2], [0, 0, 0], advantages=[0, 0, 0], sampler=[-ln2, -1, -1]),
        low=0.2,
        high=0.2,
    )  # w = 2, 1, 1/2
    assert found["kl"] == pytest.approx(0)
    assert found["k3_kl"] == pytest.approx((1 - ln2 + 0 - 0.5 + ln2) / 3)
    assert found["chi2_token"] == pytest.approx((4 + 1 + 0.25) / 3 - 1)
    assert found["ess"] == pytest.approx((3.5 / 3) ** 2 / (5.25 / 3))
    e = np.exp(-1)
    assert found["prob_diff_mean"] == pytest.approx((0.5 + 0 + e / 2) / 3)
    assert found["prob_diff_max"] == pytest.approx(0.5)


def test_sequence_metrics_use_the_summed_log_ratio():
    found = split_log_ratio(
        tokens([0.1, 0.1, 0.1, 0.1, -0.3], [0] * 5, advantages=[0] * 5, sequences=[0, 0, 0, 0, 1]),
        low=0.2,
        high=0.2,
    )
    assert found["sequence_std"] == pytest.approx(0.35)  # of .4 and -.3
    assert found["sequence_std_per_sqrt_token"] == pytest.approx(0.25)  # of .2 and -.3
    assert found["chi2_sequence"] == pytest.approx((np.exp(0.8) + np.exp(-0.6)) / 2 - 1)


def test_equal_probabilities_have_correlation_one():
    same = split_log_ratio(
        tokens([0, 0], [0, 0], advantages=[0, 0], sampler=[-1, -2]), low=0.2, high=0.2
    )
    assert same["pearson"] == pytest.approx(1)


def test_tokens_leave_out_unscored_ones():
    values = np.arange(8.0).reshape(2, 4)
    sampler = values.copy()
    sampler[0, 2] = np.nan
    parts = Split(
        learner=values,
        shadow=values,
        sampler=sampler,
        entropies=values,
        advantages=values,
        action_mask=np.array([[False, True, True, True], [True, False, True, False]]),
        segments=np.array([[1, 1, 1, 2], [1, 1, 2, 0]]),
    )
    found = parts.tokens()
    assert found.learner.tolist() == [1, 3, 4, 6]
    assert found.sequences.tolist() == [0, 1, 2, 3]


def test_a_microbatch_without_actions_has_no_moments():
    """As with `train.mask_truncated`, where the first completions of a run are all truncated."""
    rollouts = tiny.rollouts(4)
    masked = [r._replace(action_mask=r.action_mask & (i > 1)) for i, r in enumerate(rollouts)]
    shape = MinibatchShape(row_length=24, rows_per_microbatch=2)
    noise = shape_noise(
        lambda minibatch: minibatch.batch.advantages,
        masked,
        shape=shape,
        scores=np.zeros((4, 24), np.float32),
    )
    assert moments("shape_noise", noise) == {}
