"""The log-ratio in three parts, worked out by hand."""

import numpy as np
import pytest

from jaxrl.diagnostics.ratio.replay import log_ratio_parts, replay_batch
from jaxrl.diagnostics.ratio.split import Split

NAMES = ("learner", "shadow", "replay", "sampler")


def parts_of(*, replay, **logprobs) -> dict[str, float]:
    none = np.zeros_like(replay)
    rest = {"entropies": none, "advantages": none, "segments": none}
    return log_ratio_parts(Split(**logprobs, **rest, action_mask=none == 0), replay=replay)


def test_parts_sum_to_the_log_ratio():
    logprobs = dict(zip(NAMES, np.random.default_rng(0).normal(-2, 0.3, (4, 50)), strict=True))
    ratios = logprobs["learner"] - logprobs["sampler"]
    for i in range(50):
        found = parts_of(**{name: x[i : i + 1] for name, x in logprobs.items()})
        whole = found["dtype"] + found["engine"] + found["policy"]
        assert whole == pytest.approx(ratios[i], abs=1e-15)
    numbers = parts_of(**logprobs)
    whole = numbers["dtype"] + numbers["engine"] + numbers["policy"]
    assert whole == pytest.approx(ratios.mean(), abs=1e-15)


def test_each_part_is_named_for_what_differs():
    logprobs = {
        "learner": np.array([-1.0, -2.0]),
        "shadow": np.array([-1.5, -2.0]),
        "replay": np.array([-1.25, -2.5]),
        "sampler": np.array([-1.25, -1.5]),
    }
    for i, expected in enumerate([(0.5, -0.25, 0), (0, 0.5, -1)]):
        one = parts_of(**{name: x[i : i + 1] for name, x in logprobs.items()})
        assert (one["dtype"], one["engine"], one["policy"]) == expected
    numbers = parts_of(**logprobs)
    assert (numbers["dtype"], numbers["dtype_std"]) == (0.25, 0.25)
    assert numbers["policy_p99"] == pytest.approx(0.99)


def test_unscored_tokens_are_excluded():
    values = dict.fromkeys(("learner", "shadow"), np.array([-1.0, -9.0, -9.0]))
    numbers = parts_of(
        **values, replay=np.array([-2, np.nan, -9.0]), sampler=np.array([-4, -9, np.nan])
    )
    assert (numbers["dtype"], numbers["engine"], numbers["policy"]) == (0, 1, 2)


def test_shared_prefixes_are_scored_whole():
    tokens, segments = np.array([[5, 6, 7, 6, 8, 0]]), np.array([[1, 1, 1, 2, 2, 0]])

    def score(sequences):
        assert [s.tolist() for s in sequences] == [[5, 6, 7], [5, 6, 8]]
        return [-s.astype(float) for s in sequences]

    until = np.array([[5, 3, 3, 5, 5, 6]])
    found = replay_batch(score, tokens=tokens, segments=segments, seen_until=until)
    np.testing.assert_array_equal(found, [[-5, -6, -7, -6, -8, np.nan]])


def test_scores_return_to_their_positions():
    tokens = np.array([[5, 6, 7, 8, 0], [9, 4, 0, 0, 0]])
    segments = np.array([[1, 1, 2, 2, 0], [3, 3, 0, 0, 0]])

    def score(sequences):
        assert [s.tolist() for s in sequences] == [[5, 6], [7, 8], [9, 4]]
        return [np.array([np.nan, -float(s[1])]) for s in sequences]

    found = replay_batch(score, tokens=tokens, segments=segments)
    n = np.nan
    np.testing.assert_array_equal(found, [[n, -6, n, -8, n], [n, -4, n, n, n]])
