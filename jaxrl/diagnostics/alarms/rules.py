"""Alarm rules: signs that training goes wrong, as functions of the metrics.

A rule reads a `History` and returns a `Finding` or None. The same rules judge a run after each step
and a finished run's metrics.jsonl (`replay_alarms`). Later steps are compared with the first
`warmup` steps. Two rules judge those as well: `not_finite`, which compares nothing, and `kl_spike`,
which compares them with the first of them.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import Limits

_PROBES = 3  # averaged
_EARLY = 5  # steps to average over during the warm-up
_SOLVED = 0.9  # of the range of rewards: above it a policy may be certain


class Finding(NamedTuple):
    """The result of a rule."""

    value: float  # of the metric that the rule judges
    limit: float  # that the value crossed
    text: str  # both in words
    since: int | None = None  # newest step before the problem, if maybe more than a window ago


class Alarm(NamedTuple):
    """A raised finding."""

    name: str  # of the rule, as in `RULES` and `causes.CAUSES`
    step: int  # after which it was raised
    healthy: int  # newest step before the problem: a window ago, or earlier
    value: float
    limit: float
    text: str


def kl_spike(history: History, limits: Limits) -> Finding | None:
    """KL above `kl_factor` x the median of the preceding window, and above `kl_floor`. During the
    warm-up, see `_no_rise`."""
    if history.step <= limits.warmup:
        return _no_rise(history, limits)
    value, before = history.at("kl", history.step), history.before("kl", limits.window)
    if not before.size:
        return None
    limit = max(limits.kl_factor * float(np.median(before)), limits.kl_floor)
    text = f"KL {value:.3g} nats a token, median of {len(before)} steps {np.median(before):.3g}"
    return Finding(value, limit, text) if value > limit else None


def kl_with_reward(history: History, limits: Limits) -> Finding | None:
    """KL above twice the mean of the preceding window, and above `kl_floor`, while the reward
    rises."""
    value, before = history.at("kl", history.step), history.before("kl", limits.window)
    rewards = history.last("reward", limits.window)
    if not before.size or len(rewards) < 2:
        return None
    older, newer = (float(half.mean()) for half in np.array_split(rewards, 2))
    limit = max(2 * float(before.mean()), limits.kl_floor)
    text = (
        f"KL {value:.3g} nats a token, mean of {len(before)} steps {before.mean():.3g}, while the "
        f"reward rose from {older:.3g} to {newer:.3g}"
    )
    return Finding(value, limit, text) if value > limit and newer > older else None


def gradient_spike(history: History, limits: Limits) -> Finding | None:
    """Gradient norm above `gradient_factor` x the median of a window, and above `gradient_floor`.

    The window holds the last steps in which some group had reward variance: a nearly solved task
    has few, and almost no gradient in the others. Without any, the first steps serve. The median is
    at least a quarter of the first steps', so that recovery from nothing is no spike.
    """
    value, first = history.at("grad_norm", history.step), history.first("grad_norm", limits.warmup)
    before = _norms_with_variance(history, limits.window) or list(first)
    if not before:
        return None
    usual = max(float(np.median(before)), float(np.median(first)) / 4)
    limit = max(limits.gradient_factor * usual, limits.gradient_floor)
    text = f"gradient norm {value:.3g}, median of {len(before)} steps {np.median(before):.3g}"
    return Finding(value, limit, text) if value > limit else None


def diversity(history: History, limits: Limits) -> Finding | None:
    """Distinct 3-grams across prompts below `distinct_factor` x those of the first steps."""
    noun = "distinct 3-grams"
    return _fallen(history, limits, "diversity/distinct", limits.distinct_factor, noun)


def identical(history: History, limits: Limits) -> Finding | None:
    """Share of identical completions over a window risen by `identical_rise` of the way from the
    first steps' share to 1, while the task is not solved."""
    share, usual = _means(history, limits, "diversity/identical", limits.window)
    limit = usual + limits.identical_rise * (1 - usual)
    text = (
        f"{share:.0%} of the completions equal another one of their prompt, over {limits.window} "
        f"steps, {usual:.0%} in the first steps"
    )
    return Finding(share, limit, text) if share > limit and not _solved(history, limits) else None


def repetition(history: History, limits: Limits) -> Finding | None:
    """Share of repeated 3-grams risen by `repetition_rise` of the way from the first steps to 1."""
    share, usual = _means(history, limits, "diversity/repetition", limits.short)
    limit = usual + limits.repetition_rise * (1 - usual)
    text = f"{share:.0%} of a completion's 3-grams are repetitions, {usual:.0%} in the first steps"
    return Finding(share, limit, text) if share > limit else None


def length_limit(history: History, limits: Limits) -> Finding | None:
    """Share of truncated completions at least `truncated_share`, and .3 above the first steps."""
    share, usual = _means(history, limits, "completion/truncated", limits.short)
    limit = max(limits.truncated_share, usual + 0.3)
    text = f"{share:.0%} of the completions are truncated, {usual:.0%} in the first steps"
    return Finding(share, limit, text) if share >= limit else None


def length_zero(history: History, limits: Limits) -> Finding | None:
    """Completion length below `length_factor` x that of the first steps."""
    noun = "tokens a completion"
    return _fallen(history, limits, "completion_length", limits.length_factor, noun)


def entropy(history: History, limits: Limits) -> Finding | None:
    """Entropy below `entropy_factor` x that of the first steps, while the task is not solved."""
    noun = "nats of entropy a token"
    found = _fallen(history, limits, "entropy/sampled", limits.entropy_factor, noun)
    return None if _solved(history, limits) else found


def held_out(history: History, limits: Limits) -> Finding | None:
    """Held-out accuracy `held_out_drop` below its best, while the reward is higher than then."""
    steps, scores = history.series("eval/accuracy")
    if len(scores) < 2:
        return None
    best = int(np.argmax(scores))
    # An evaluation before the first step is compared with that step's reward.
    then = history.between("reward", steps[best] - limits.short, max(steps[best], 1))
    now = history.last("reward", limits.short)
    if not then.size or not now.size:
        return None
    drop, rise = scores[best] - scores[-1], float(now.mean()) - float(then.mean())
    text = (
        f"held-out accuracy {scores[best]:.1%} after step {steps[best]} and {scores[-1]:.1%} after "
        f"step {steps[-1]}, while the reward rose by {rise:.3g}"
    )
    if drop <= limits.held_out_drop or rise <= 0:
        return None
    since = max(step for step, score in zip(steps, scores, strict=True) if score == scores[best])
    return Finding(drop, limits.held_out_drop, text, since)


def zero_variance(history: History, limits: Limits) -> Finding | None:
    """No reward variance in any group of a window, so that there is nothing to learn from but a
    teacher."""
    if "kl/teacher" in history.names:
        return None
    flat = history.last("groups/zero_std", limits.window)
    groups = history.last("groups/sampled", limits.window)
    if not flat.size or not groups.size or (flat < groups).any():
        return None
    reward = float(history.last("reward", 1)[0])
    text = f"no group had reward variance over {len(flat)} steps, at a mean reward of {reward:.3g}"
    return Finding(float(flat[-1]), float(groups[-1]), text)


def sequence_mismatch(history: History, limits: Limits) -> Finding | None:
    """Spread of whole completions' log-ratios before any update: doubled, and above
    `mismatch_nats`. The early warning of arXiv:2510.26788."""
    noun = "nats of spread in the log-ratio of a completion"
    return _grown(history, "probe/sequence_std", floor=limits.mismatch_nats, noun=noun)


def phantom(history: History, limits: Limits) -> Finding | None:
    """Share of tokens clipped because of arithmetic alone: above `phantom_share`, or doubled and
    above a fifth of it."""
    steps, values = history.present("probe/phantom")
    noun = "of all tokens are phantom clips"
    if len(steps) >= _PROBES and (mean := fmean(values[-_PROBES:])) > limits.phantom_share:
        text = f"{mean:.3g} {noun}, over {_PROBES} probes"
        return Finding(mean, limits.phantom_share, text, steps[-_PROBES] - 1)
    return _grown(history, "probe/phantom", floor=limits.phantom_share / 5, noun=noun)


def not_finite(history: History, limits: Limits) -> Finding | None:
    """An update of the policy or the critic skipped in each of the last `not_finite_steps` steps
    because its gradient was not finite: more than a loss scale needs to settle."""
    for model, prefix in (("policy", ""), ("critic", "value/")):
        steps, _ = history.series(f"{prefix}skipped_steps")
        finite, _ = history.series(f"{prefix}grad_norm")  # a History holds finite values only
        since = finite[-1] if finite else 0
        count = len(steps) - bisect.bisect_right(steps, since)
        if count >= limits.not_finite_steps and steps[-1] == history.step:
            text = f"no finite gradient of the {model} after step {since}, in {count} steps"
            return Finding(count, limits.not_finite_steps, text, since)
    return None


RULES: Mapping[str, Callable[[History, Limits], Finding | None]] = {
    rule.__name__: rule
    for rule in (
        kl_spike,
        kl_with_reward,
        gradient_spike,
        diversity,
        identical,
        repetition,
        length_limit,
        length_zero,
        entropy,
        held_out,
        zero_variance,
        sequence_mismatch,
        phantom,
        not_finite,
    )
}
_FROM_THE_FIRST_STEP = {not_finite.__name__, kl_spike.__name__}


def check_alarms(history: History, limits: Limits, *, raised: Mapping[str, int]) -> list[Alarm]:
    """Applies all rules to the newest step. `raised` has the step of each rule's last alarm: it is
    silent for a window after that."""
    silent = {name for name, step in raised.items() if history.step <= step + limits.window}
    if history.step <= limits.warmup:
        silent |= RULES.keys() - _FROM_THE_FIRST_STEP
    findings = ((name, rule(history, limits)) for name, rule in RULES.items() if name not in silent)
    window_ago = history.step - limits.window
    return [
        Alarm(
            name,
            history.step,
            max(0, window_ago if found.since is None else min(window_ago, found.since)),
            *found[:3],
        )
        for name, found in findings
        if found is not None
    ]


def replay_alarms(entries: Iterable[Mapping[str, Any]], limits: Limits) -> list[Alarm]:
    """Returns all alarms that a run with these entries of `tracking.read_metrics` raises."""
    history, raised, alarms = History(), dict[str, int](), list[Alarm]()
    for _, group in itertools.groupby(entries, key=lambda entry: entry["step"]):
        of_step = list(group)
        for entry in (e for e in of_step if "event" not in e):
            history.add(entry)
        if any("reward" in entry for entry in of_step):
            new = check_alarms(history, limits, raised=raised)
            raised |= {alarm.name: alarm.step for alarm in new}
            alarms += new
        for entry in (e for e in of_step if "event" in e):  # an event affects later steps only
            history.add(entry)
    return alarms


def _no_rise(history: History, limits: Limits) -> Finding | None:
    """Mean reward of the last five steps clearly below that of the first two, or not above it while
    their mean KL is above `kl_floor`: updates too large to improve the policy.

    A fall counts from four standard errors, which the differences of successive steps estimate. A
    run has ten steps to rise. A solved task needs no rise, nor does a policy that learns from a
    teacher.
    """
    rewards = np.array(history.series("reward").values)
    taught = "kl/teacher" in history.names
    if len(rewards) < 2 * _EARLY or taught or _solved(history, limits):
        return None
    first, recent = float(rewards[:2].mean()), float(rewards[-_EARLY:].mean())
    noise = float(np.sqrt(np.mean(np.diff(rewards) ** 2) / 2))
    error = noise * math.sqrt(1 / 2 + 1 / _EARLY)
    kls = history.last("kl", _EARLY)
    kl = float(kls.mean()) if kls.size else math.nan
    text = (
        f"the reward went from {first:.3g} in the first two steps to {recent:.3g} in the last "
        f"{_EARLY}, at a KL of {kl:.3g} nats a token"
    )
    if first - recent > max(4 * error, 1e-9):
        return Finding(first - recent, 4 * error, text)
    return Finding(kl, limits.kl_floor, text) if recent <= first and kl > limits.kl_floor else None


def _norms_with_variance(history: History, count: int) -> list[float]:
    """Returns gradient norms of the last `count` earlier steps in which some group had reward
    variance, looking back at most ten times as many steps."""
    steps, values = history.series("grad_norm")
    norms: list[float] = []
    newest_first = zip(reversed(steps), reversed(values), strict=True)
    for step, value in itertools.islice(newest_first, 10 * count):
        flat, groups = (history.at(f"groups/{n}", step) for n in ("zero_std", "sampled"))
        if step != history.step and not flat >= groups:
            norms.append(value)
            if len(norms) == count:
                break
    return norms


def _solved(history: History, limits: Limits) -> bool:
    """Returns True if the recent mean reward is in the top tenth of the range of rewards.

    Certainty and identical completions are then the goal. The range begins at the lowest tenth of
    the first steps' completions, so that a single large penalty does not make the rest look good.
    """
    worst = history.first("reward/p10", limits.warmup)
    rewards = history.last("reward", limits.short)
    if not worst.size or not rewards.size:
        return False
    low, high = float(np.median(worst)), history.highest("reward/max")
    return float(rewards.mean()) >= low + _SOLVED * (high - low)


def _means(history: History, limits: Limits, name: str, count: int) -> tuple[float, float]:
    """Returns the means of the last `count` values and of the first steps; NaN without them."""
    values, first = history.last(name, count), history.first(name, limits.warmup)
    return (float(values.mean()), float(first.mean())) if values.size else (math.nan, math.nan)


def _fallen(
    history: History, limits: Limits, name: str, factor: float, noun: str
) -> Finding | None:
    value, usual = _means(history, limits, name, limits.short)
    text = f"{value:.3g} {noun}, {usual:.3g} in the first steps"
    return Finding(value, factor * usual, text) if value < factor * usual else None


def _grown(history: History, name: str, *, floor: float, noun: str) -> Finding | None:
    """Compares the last three probes in the present precision with the first three."""
    steps, values = history.present(name)
    if len(steps) < 2 * _PROBES:
        return None
    value, first = fmean(values[-_PROBES:]), fmean(values[:_PROBES])
    limit = max(2 * first, floor)
    text = f"{value:.3g} {noun}, {first:.3g} in the first probes"
    return Finding(value, limit, text, steps[-_PROBES] - 1) if value > limit else None
