"""Advantages of whole completions from their rewards (host, numpy).

All take the reward of each rollout, f[N], and the index of its group, i[N], and return f32[N]. A
reward that is NaN could not be computed: it is left out of every statistic and its advantage is 0.
"""

import numpy as np

from jaxrl.advantages.outcomes import within_group


@within_group
def group_relative(rewards: np.ndarray, groups: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """(reward - mean) / (std + eps) within the group, std unbiased; alone in its group: the reward.

    GRPO, arXiv:2402.03300.

    Example:
      >>> group_relative(np.array([1.0, 0.0, 9.0]), np.array([7, 7, 8])).round(3)
      array([ 0.707, -0.707,  9.   ], dtype=float32)

    Raises:
      ValueError: if the two arrays do not have one shape [N], or a reward is infinite.
    """
    rewards, index, count = grouped(rewards, groups)
    centred = rewards - group_mean(rewards, index, count)
    std = _group_std(centred, index, count)
    return _finished(np.where(count[index] > 1, centred / (std + eps), rewards))


@within_group
def centred(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Reward - mean of the group; alone in its group: 0.

    Dr. GRPO, arXiv:2503.20783. Raises as `group_relative`.

    Example:
      >>> centred(np.array([1.0, 0.0, 9.0]), np.array([7, 7, 8]))
      array([ 0.5, -0.5,  0. ], dtype=float32)
    """
    rewards, index, count = grouped(rewards, groups)
    return _finished(rewards - group_mean(rewards, index, count))


@within_group
def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Reward - mean of the others in the group; alone in its group: the reward.

    RLOO, arXiv:2402.14740. Raises as `group_relative`.

    Example:
      >>> leave_one_out(np.array([1.0, 0.0, 0.0, 9.0]), np.array([7, 7, 7, 8]))
      array([ 1. , -0.5, -0.5,  9. ], dtype=float32)
    """
    rewards, index, count = grouped(rewards, groups)
    n = count[index]
    factor = n / np.maximum(n - 1, 1)
    value = factor * (rewards - group_mean(rewards, index, count))
    return _finished(np.where(n > 1, value, rewards))


@within_group
def batch_relative(rewards: np.ndarray, groups: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """(reward - mean of the group) / (std + eps), std of all rewards of the batch, unbiased; alone
    in its group: 0. An easy or a hard prompt, whose rewards hardly differ, is not blown up.

    Lite PPO, arXiv:2508.08221; TRL's scale_rewards="batch", with eps = 1e-4. Raises as
    `group_relative`.

    Example:
      >>> batch_relative(np.array([1.0, 0.0, 2.0, 2.0]), np.array([7, 7, 8, 8])).round(3)
      array([ 0.522, -0.522,  0.   ,  0.   ], dtype=float32)
    """
    rewards, index, count = grouped(rewards, groups)
    known = rewards[~np.isnan(rewards)]
    std = known.std(ddof=1) if known.size > 1 else 0.0
    return _finished((rewards - group_mean(rewards, index, count)) / (std + eps))


@within_group
def leave_one_out_relative(
    rewards: np.ndarray, groups: np.ndarray, *, eps: float = 1e-6
) -> np.ndarray:
    """(reward - mean of the others in the group) / (std of the others + eps), std unbiased. Where
    the others are all equal it is the difference itself; alone in its group: 0.

    RLOO's baseline (arXiv:2402.14740), normalised by the std of the same rewards: NeMo-RL's
    leave-one-out baseline with normalised rewards, in MLPerf's GRPO recipe. Raises as
    `group_relative`.

    Example:
      >>> leave_one_out_relative(np.array([2.0, 1.0, 0.0, 0.0]), np.array([7, 7, 7, 7])).round(3)
      array([ 2.887,  0.289, -1.   , -1.   ], dtype=float32)
    """
    rewards, index, count = grouped(rewards, groups)
    others = count[index] - 1
    apart = np.nan_to_num(rewards - group_mean(rewards, index, count))
    # Without this reward, the sum of squares about the mean is smaller by n / (n - 1) apart^2.
    total = np.bincount(index, apart**2, minlength=len(count))[index]
    squares = total - (others + 1) / np.maximum(others, 1) * apart**2
    std = np.sqrt(np.maximum(squares, 0) / np.maximum(others - 1, 1))
    difference = (others + 1) / np.maximum(others, 1) * apart
    # What rounding leaves of a std of 0 grows with the rewards and with the whole sum of squares.
    equal = std <= 1e-7 * np.maximum(np.maximum(1, np.abs(rewards)), np.sqrt(total))
    found = np.where(equal, difference, difference / (std + eps))
    return _finished(np.where(np.isnan(rewards) | (others < 1), 0.0, found))


@within_group
def leave_one_out_whitened(
    rewards: np.ndarray, groups: np.ndarray, *, eps: float = 1e-6
) -> np.ndarray:
    """`leave_one_out`, less its mean and divided by its std + eps over the completions of the
    batch, std unbiased.

    TRL's RLOO (arXiv:2402.14740) with normalize_advantages, and eps = 1e-4 there. Raises as
    `group_relative`.

    Example:
      >>> rewards, groups = np.array([1.0, 0.0, 3.0, 1.0]), np.array([7, 7, 8, 8])
      >>> leave_one_out_whitened(rewards, groups).round(3)  # 1, -1, 2 and -2 before
      array([ 0.548, -0.548,  1.095, -1.095], dtype=float32)
    """
    advantages = leave_one_out(rewards, groups).astype(np.float64)
    failed = np.isnan(np.asarray(rewards, np.float64))
    known = advantages[~failed]
    mean, std = (known.mean(), known.std(ddof=1)) if known.size > 1 else (0.0, 1.0)
    return _finished(np.where(failed, 0.0, (advantages - mean) / (std + eps)))


@within_group
def gpg(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(reward - mean of the group) x completions / completions in groups with different rewards:
    groups without a gradient do not shrink the batch's.

    GPG, arXiv:2504.02546, with F_norm = 1. veRL divides by the number of completions with a reward
    other than 0 instead. Raises as `group_relative`.

    Example:
      >>> gpg(np.array([1.0, 0.0, 1.0, 1.0]), np.array([7, 7, 8, 8]))
      array([ 1., -1.,  0.,  0.], dtype=float32)
    """
    apart = centred(rewards, groups).astype(np.float64)
    rewards, index, count = grouped(rewards, groups)
    valid = np.sum(count[spread_groups(rewards, index, count)])
    return _finished(apart * (np.sum(count) / max(valid, 1)))


@within_group
def pass_at_k(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The best completion of a group gets its reward - the second best reward, the others get 0;
    with a tie for the first place all get 0; alone in its group: the reward.

    The gradient of the expected best of k completions, arXiv:2503.19595.
    Raises as `group_relative`.

    Example:
      >>> pass_at_k(np.array([1.0, 0.75, 0.0, 9.0]), np.array([7, 7, 7, 8]))
      array([0.25, 0.  , 0.  , 9.  ], dtype=float32)
    """
    rewards, index, _ = grouped(rewards, groups)
    order = np.lexsort((rewards, index))  # by group, then by reward; NaN comes last
    order = order[~np.isnan(rewards[order])]
    advantages = np.zeros(len(rewards))
    ends = np.flatnonzero(np.diff(index[order], append=-1))
    for start, end in zip(np.append(0, ends[:-1] + 1), ends, strict=False):
        best = order[end]
        second = rewards[order[end - 1]] if end > start else 0.0
        advantages[best] = rewards[best] - second
    return _finished(advantages)


@within_group
def pass_at_k_relative(rewards: np.ndarray, groups: np.ndarray, *, eps: float = 1e-6) -> np.ndarray:
    """`pass_at_k` / (std + eps) of the group, std unbiased; alone in its group: the reward.

    veRL's estimator grpo_passk (arXiv:2503.19595), divided as in GRPO. Raises as `group_relative`.

    Example:
      >>> pass_at_k_relative(np.array([1.0, 0.0, 0.0, 9.0]), np.array([7, 7, 7, 8])).round(3)
      array([1.732, 0.   , 0.   , 9.   ], dtype=float32)
    """
    advantages = pass_at_k(rewards, groups).astype(np.float64)
    rewards, index, count = grouped(rewards, groups)
    std = _group_std(rewards - group_mean(rewards, index, count), index, count)
    return _finished(np.where(count[index] > 1, advantages / (std + eps), advantages))


@within_group
def max_rl(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(reward - mean) / mean of the group, 0 where all rewards are 0: hard prompts weigh more.

    Maximum likelihood RL, arXiv:2602.02710. Raises as `group_relative`.

    Example:
      >>> max_rl(np.array([1.0, 0.0, 0.0, 0.0]), np.array([7, 7, 7, 7]))
      array([ 3., -1., -1., -1.], dtype=float32)

    Raises:
      ValueError: also for a negative reward.
    """
    rewards, index, count = grouped(rewards, groups)
    negative = np.flatnonzero(rewards < 0)
    if negative.size:
        raise ValueError(
            f"max_rl: the reward of rollout {negative[0]} is {rewards[negative[0]]}, and max_rl "
            "divides by the mean reward; give rewards >= 0, without penalties"
        )
    mean = group_mean(rewards, index, count)
    return _finished(np.where(mean > 0, rewards / np.where(mean > 0, mean, 1.0) - 1, 0.0))


def zero_std_groups(rewards: np.ndarray, groups: np.ndarray) -> int:
    """Counts groups of two or more known rewards, all equal: they have no gradient.

    Example:
      >>> zero_std_groups(np.array([1.0, 1.0, 1.0, 0.0]), np.array([7, 7, 8, 8]))
      1
    """
    rewards, index, count = grouped(rewards, groups)
    return int(np.sum((count > 1) & ~spread_groups(rewards, index, count)))


def grouped(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rewards in f64, the group index of each, and the known rewards per group."""
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"rewards {rewards.shape} and groups {groups.shape} must both have shape [N]"
        )
    infinite = np.flatnonzero(np.isinf(rewards))
    if infinite.size:
        raise ValueError(
            f"the reward of rollout {infinite[0]} is {rewards[infinite[0]]}; give a finite reward, "
            "or NaN if it could not be computed"
        )
    _, index = np.unique(groups, return_inverse=True)
    return rewards, index, np.bincount(index, ~np.isnan(rewards))


def spread_groups(rewards: np.ndarray, index: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Marks the groups with different known rewards, bool[groups]; arguments as `grouped` returns
    them."""
    highest, lowest = np.full(len(count), -np.inf), np.full(len(count), np.inf)
    np.fmax.at(highest, index, rewards)
    np.fmin.at(lowest, index, rewards)
    return highest > lowest


def group_mean(rewards: np.ndarray, index: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Computes, for each reward, the mean of its group's known rewards; arguments as `grouped`
    returns them."""
    total = np.bincount(index, np.nan_to_num(rewards), minlength=len(count))
    return (total / np.maximum(count, 1))[index]


def _group_std(centred: np.ndarray, index: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Computes, for each reward, the unbiased std of its group's; `centred` are less their mean."""
    total = np.bincount(index, np.nan_to_num(centred**2), minlength=len(count))
    return np.sqrt(total / np.maximum(count - 1, 1))[index]


def _finished(advantages: np.ndarray) -> np.ndarray:
    return np.nan_to_num(advantages).astype(np.float32)
