"""Signs that a run goes wrong, as functions of its metrics.

A rule looks at a `History` and says what it found, or nothing. The same rules judge a run after
each of its steps and the metrics.jsonl of one that is over (`replay`). The first `warmup` steps are
what later steps are compared with; in them only `not_finite` judges, which compares with nothing.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config.alarms import Limits
from jaxrl.monitoring.alarms.history import History

_PROBES = 3  # that are taken together
_SOLVED = 0.9  # of the range of rewards: a mean above it needs no variety


class Finding(NamedTuple):
    """What a rule found: a number, the line that it crossed, and both in words.

    Attributes:
      value, limit, text: these.
      since: the newest step that what it found is not of, where that may be older than a window.
    """

    value: float
    limit: float
    text: str
    since: int | None = None


class Alarm(NamedTuple):
    """A finding that was raised.

    Attributes:
      name: of the rule, as in `RULES` and `causes.CAUSES`.
      step: after which it was raised.
      healthy: the newest step of which nothing that was found is: a window ago, or earlier.
      value, limit, text: as in `Finding`.
    """

    name: str
    step: int
    healthy: int
    value: float
    limit: float
    text: str


Rule = Callable[[History, Limits], Finding | None]


def kl_spike(history: History, limits: Limits) -> Finding | None:
    """KL above `kl_factor` x the median of the window before, and above `kl_floor`."""
    value, before = history.newest("kl"), history.before("kl", limits.window)
    if not before.size:
        return None
    limit = max(limits.kl_factor * float(np.median(before)), limits.kl_floor)
    text = f"KL {value:.3g} nats a token, median of {len(before)} steps {np.median(before):.3g}"
    return Finding(value, limit, text) if value > limit else None


def kl_with_reward(history: History, limits: Limits) -> Finding | None:
    """KL above twice its moving average, and above `kl_floor`, while the reward still rises."""
    value, before = history.newest("kl"), history.before("kl", limits.window)
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
    """Gradient norm above `gradient_factor` x the median of the window before, or a quarter of the
    first steps' median if that is larger (to come back from nothing is no spike), and above
    `gradient_floor`. The window is of steps in which some group had spread: in a task that is
    nearly solved most have none, and next to nothing to learn. Without any it is the first steps
    that count."""
    value, first = history.newest("grad_norm"), history.first("grad_norm", limits.warmup)
    before = _before_with_spread(history, limits.window) or list(first)
    if not before:
        return None
    usual = max(float(np.median(before)), float(np.median(first)) / 4)
    limit = max(limits.gradient_factor * usual, limits.gradient_floor)
    text = f"gradient norm {value:.3g}, median of {len(before)} steps {np.median(before):.3g}"
    return Finding(value, limit, text) if value > limit else None


def _before_with_spread(history: History, count: int) -> list[float]:
    """Gradient norms of the last `count` steps before this one in which some group had spread; none
    is looked for further back than ten times as many steps."""
    steps, values = history.column("grad_norm")
    found: list[float] = []
    newest_first = zip(reversed(steps), reversed(values), strict=True)
    for step, value in itertools.islice(newest_first, 10 * count):
        flat, groups = (history.at(f"groups/{n}", step) for n in ("zero_std", "sampled"))
        if step != history.step and not flat >= groups:
            found.append(value)
            if len(found) == count:
                break
    return found


def diversity(history: History, limits: Limits) -> Finding | None:
    """Distinct 3-grams across prompts below `distinct_factor` x those of the first steps."""
    return _fallen(
        history, limits, "diversity/distinct", limits.distinct_factor, "distinct 3-grams"
    )


def identical(history: History, limits: Limits) -> Finding | None:
    """Answers that equal another answer to their prompt, over a window: `identical_rise` of the way
    from the first steps' share to 1, and the task is not solved."""
    values = history.last("diversity/identical", limits.window)
    first = history.first("diversity/identical", limits.warmup)
    if not values.size or _solved(history, limits):
        return None
    share, usual = float(values.mean()), float(first.mean())
    limit = usual + limits.identical_rise * (1 - usual)
    text = (
        f"{share:.0%} of the answers equal another to their prompt, over {len(values)} steps, "
        f"{usual:.0%} in the first steps"
    )
    return Finding(share, limit, text) if share > limit else None


def repetition(history: History, limits: Limits) -> Finding | None:
    """Repeated 3-grams in answers: `repetition_rise` of the way from the first steps' to 1."""
    values = history.last("diversity/repetition", limits.short)
    first = history.first("diversity/repetition", limits.warmup)
    if not values.size:
        return None
    share, usual = float(values.mean()), float(first.mean())
    limit = usual + limits.repetition_rise * (1 - usual)
    text = f"{share:.0%} of an answer's 3-grams are repetitions, {usual:.0%} in the first steps"
    return Finding(share, limit, text) if share > limit else None


def length_limit(history: History, limits: Limits) -> Finding | None:
    """At least `truncated_share` of the answers end at sampling.max_tokens, .3 more than in the
    first steps."""
    values = history.last("completion/truncated", limits.short)
    first = history.first("completion/truncated", limits.warmup)
    if not values.size:
        return None
    share, usual = float(values.mean()), float(first.mean())
    limit = max(limits.truncated_share, usual + 0.3)
    text = f"{share:.0%} of the answers are cut at the limit, {usual:.0%} in the first steps"
    return Finding(share, limit, text) if share >= limit else None


def length_zero(history: History, limits: Limits) -> Finding | None:
    """Answers shorter than `length_factor` x those of the first steps."""
    return _fallen(history, limits, "completion_length", limits.length_factor, "tokens an answer")


def entropy(history: History, limits: Limits) -> Finding | None:
    """Entropy of the sampled tokens below `entropy_factor` x that of the first steps, and the task
    is not solved."""
    if _solved(history, limits):
        return None
    return _fallen(
        history, limits, "entropy/sampled", limits.entropy_factor, "nats of entropy a token"
    )


def held_out(history: History, limits: Limits) -> Finding | None:
    """Held-out accuracy `held_out_drop` below its best while the reward is higher than it was
    then."""
    steps, scores = history.column("eval/accuracy")
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


def zero_spread(history: History, limits: Limits) -> Finding | None:
    """In every group of a window all answers earned the same: there is nothing to learn from."""
    flat = history.last("groups/zero_std", limits.window)
    groups = history.last("groups/sampled", limits.window)
    if not flat.size or not groups.size or (flat < groups).any():
        return None
    reward = float(history.last("reward", 1)[0])
    text = f"every group earned the same within, over {len(flat)} steps, at a mean of {reward:.3g}"
    return Finding(float(flat[-1]), float(groups[-1]), text)


def sequence_mismatch(history: History, limits: Limits) -> Finding | None:
    """The spread of whole answers' log-ratios before any update has doubled and is above
    `mismatch_nats` nats: the early warning of arXiv:2510.26788."""
    return _grown(
        history,
        limits,
        "probe/sequence_std",
        floor=limits.mismatch_nats,
        noun="nats of spread in the log-ratio of an answer",
    )


def phantom(history: History, limits: Limits) -> Finding | None:
    """Tokens that are clipped for arithmetic alone: above `phantom_share`, or doubled and above a
    fifth of it."""
    probes = history.ends("probe/phantom", _PROBES)
    noun = "of all tokens are phantoms of the clip"
    if probes.number >= _PROBES and (mean := float(probes.last.mean())) > limits.phantom_share:
        text = f"{mean:.3g} {noun}, over {_PROBES} probes"
        return Finding(mean, limits.phantom_share, text, probes.before)
    return _grown(history, limits, "probe/phantom", floor=limits.phantom_share / 5, noun=noun)


def not_finite(history: History, limits: Limits) -> Finding | None:
    """In each of the last `not_finite_steps` steps an update of the policy, or of the critic, was
    skipped because its gradient was not finite: more than a loss scale needs to settle."""
    for whose, prefix in (("policy", ""), ("critic", "value/")):
        steps, _ = history.column(f"{prefix}skipped_steps")
        finite, _ = history.column(f"{prefix}grad_norm")  # what is not finite is not in it
        since = finite[-1] if finite else 0
        count = len(steps) - bisect.bisect_right(steps, since)
        if count >= limits.not_finite_steps and steps[-1] == history.step:
            text = f"no finite gradient of the {whose} after step {since}, in {count} steps"
            return Finding(count, limits.not_finite_steps, text, since)
    return None


RULES: Mapping[str, Rule] = {
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
        zero_spread,
        sequence_mismatch,
        phantom,
        not_finite,
    )
}
_FROM_THE_FIRST_STEP = {not_finite.__name__}


def check(history: History, limits: Limits, *, raised: Mapping[str, int]) -> list[Alarm]:
    """The alarms of the newest step.

    Args:
      history: of the run up to a step.
      limits: where the lines are.
      raised: {name: step} at which alarms were raised last; one is silent for a window after that.
    """
    silent = {name for name, step in raised.items() if history.step <= step + limits.window}
    if history.step <= limits.warmup:
        silent |= RULES.keys() - _FROM_THE_FIRST_STEP
    findings = ((name, rule(history, limits)) for name, rule in RULES.items() if name not in silent)
    return [_alarm(name, found, history, limits) for name, found in findings if found is not None]


def _alarm(name: str, found: Finding, history: History, limits: Limits) -> Alarm:
    before = history.step - limits.window
    healthy = max(0, before if found.since is None else min(before, found.since))
    return Alarm(name, history.step, healthy, found.value, found.limit, found.text)


def replay(entries: Iterable[Mapping[str, Any]], limits: Limits) -> list[Alarm]:
    """All alarms that a run raises, or would have raised with these limits.

    Args:
      entries: as `tracking.read_metrics` returns them.
      limits: where the lines are.
    """
    history, raised, alarms = History(), dict[str, int](), list[Alarm]()
    for _, group in itertools.groupby(entries, key=lambda entry: entry["step"]):
        of_step = list(group)
        for entry in (e for e in of_step if "event" not in e):
            history.add(entry)
        if any("reward" in entry for entry in of_step):
            new = check(history, limits, raised=raised)
            raised |= {alarm.name: alarm.step for alarm in new}
            alarms += new
        for entry in (e for e in of_step if "event" in e):  # of what comes after the step
            history.add(entry)
    return alarms


def _solved(history: History, limits: Limits) -> bool:
    """Whether the mean reward of the last steps is within a tenth of the range of rewards from the
    highest that was ever earned: certainty and sameness are then what was wanted. The range begins
    at the lowest tenth of the first steps' answers, so that one answer that is punished as no other
    does not make the rest of them look good."""
    worst = history.first("reward/p10", limits.warmup)
    rewards = history.last("reward", limits.short)
    if not worst.size or not rewards.size:
        return False
    low, high = float(np.median(worst)), history.highest("reward/max")
    return float(rewards.mean()) >= low + _SOLVED * (high - low)


def _fallen(
    history: History, limits: Limits, name: str, factor: float, noun: str
) -> Finding | None:
    values, first = history.last(name, limits.short), history.first(name, limits.warmup)
    if not values.size:
        return None
    value, usual = float(values.mean()), float(first.mean())
    text = f"{value:.3g} {noun}, {usual:.3g} in the first steps"
    return Finding(value, factor * usual, text) if value < factor * usual else None


def _grown(
    history: History, limits: Limits, name: str, *, floor: float, noun: str
) -> Finding | None:
    """The last three probes against the first three, none of which are the same; since the run
    changed its precision, if it did."""
    probes = history.ends(name, _PROBES)
    if probes.number < 2 * _PROBES:
        return None
    value, first = float(probes.last.mean()), float(probes.first.mean())
    limit = max(2 * first, floor)
    text = f"{value:.3g} {noun}, {first:.3g} in the first probes"
    return Finding(value, limit, text, probes.before) if value > limit else None
