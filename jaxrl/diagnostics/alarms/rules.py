"""Alarm rules: signs that training goes wrong, as functions of the metrics.

A rule reads a `History` and returns a `Finding` or None. Its docstring begins with the condition
that `Cause` shows. Later steps are compared with the first `warmup` steps.
"""

import bisect
import math
from statistics import fmean

import numpy as np

from jaxrl.diagnostics.alarms.comparisons import (
    PROBES,
    fallen,
    grown,
    means,
    norms_with_variance,
    solved,
)
from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import Limits
from jaxrl.diagnostics.alarms.table import Finding, Rule, rule

_EARLY = 5  # steps to average over during the warm-up


@rule(
    "KL spike or falling reward",
    causes="a step that is too large, or a batch of rare completions with high rewards; nothing "
    "holds the policy near the reference",
    keys=("optimizer.learning_rate", "loss.kl", "optimizer.clip_norm", "train.updates_per_rollout"),
)
def kl_spike(history: History, limits: Limits) -> Finding | None:
    """KL above {kl_factor} x the median of the last {window} steps, and above {kl_floor} nats per
    token. In steps 10 to {warmup}, while the task is not solved: a mean reward clearly below the
    first two steps', or not above it at a KL above {kl_floor}."""
    if history.done <= limits.warmup:
        return _no_rise(history, limits)
    value, before = history.at("kl", history.step), history.before("kl", limits.window)
    if not before.size:
        return None
    limit = max(limits.kl_factor * float(np.median(before)), limits.kl_floor)
    text = f"KL {value:.3g} nats a token, median of {len(before)} steps {np.median(before):.3g}"
    return Finding(value, limit, text) if value > limit else None


@rule(
    "KL grows fast while the reward rises",
    causes="the policy exploits a loophole in the reward, far from the reference",
    keys=("reward.path", "loss.kl", "optimizer.learning_rate"),
)
def kl_with_reward(history: History, limits: Limits) -> Finding | None:
    """KL above twice the mean of the last {window} steps, and above {kl_floor} nats per token,
    while the reward rises."""
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


@rule(
    "gradient-norm spike",
    causes="a learning rate that is too high, a long run without a KL term, or 16-bit arithmetic",
    keys=("optimizer.learning_rate", "loss.kl", "optimizer.clip_norm", "precision"),
)
def gradient_spike(history: History, limits: Limits) -> Finding | None:
    """Gradient norm above {gradient_factor} x its median over the last {window} steps in which some
    group had different rewards, and above {gradient_floor}.

    A nearly solved task has few such steps, and almost no gradient in the others; without any, the
    first steps are used. The median counts as at least a quarter of theirs, so that recovery from a
    vanishing gradient does not count as a spike.
    """
    value, first = history.at("grad_norm", history.step), history.first("grad_norm", limits.warmup)
    before = norms_with_variance(history, limits.window) or list(first)
    if not before:
        return None
    usual = max(float(np.median(before)), float(np.median(first)) / 4)
    limit = max(limits.gradient_factor * usual, limits.gradient_floor)
    text = f"gradient norm {value:.3g}, median of {len(before)} steps {np.median(before):.3g}"
    return Finding(value, limit, text) if value > limit else None


@rule(
    "clipped tokens",
    causes="updates that are too large or too many for one rollout, a long run without a KL term, "
    "or stale completions; if probe/phantom rose too, arithmetic",
    keys=("optimizer.learning_rate", "train.max_kl", "train.updates_per_rollout", "loss.kl"),
)
def clipping(history: History, limits: Limits) -> Finding | None:
    """Share of clipped tokens, `clip/low` and `clip/high` together: above {clip_share}, and above
    {clip_factor} x the first steps'.

    Recipes with a narrow clip, such as GSPO, clip many tokens from the beginning.
    """
    sides = [means(history, limits, f"clip/{side}", limits.short) for side in ("low", "high")]
    share, usual = (sum(numbers) for numbers in zip(*sides, strict=True))
    limit = max(limits.clip_share, limits.clip_factor * usual)
    text = f"{share:.1%} of the tokens are clipped, {usual:.1%} in the first steps"
    return Finding(share, limit, text) if share > limit else None


@rule(
    "diversity collapse",
    causes="completions no longer depend on the prompt: one pattern earns the reward for all of "
    "them",
    keys=("reward.path", "loss.kl", "loss.entropy", "sampling.temperature"),
)
def diversity(history: History, limits: Limits) -> Finding | None:
    """Share of distinct 3-grams across prompts: below {distinct_factor} x the first steps'."""
    noun = "distinct 3-grams"
    return fallen(history, limits, "diversity/distinct", limits.distinct_factor, noun)


@rule(
    "identical completions",
    causes="the policy is certain of completions that are not the best; groups have nothing to "
    "teach",
    keys=("loss.entropy", "sampling.temperature", "optimizer.learning_rate", "loss.kl"),
)
def identical(history: History, limits: Limits) -> Finding | None:
    """Share of completions identical to another one of their prompt, over {window} steps: risen
    {identical_rise} of the way from the first steps' share to 1, while the task is not solved."""
    share, usual = means(history, limits, "diversity/identical", limits.window)
    limit = usual + limits.identical_rise * (1 - usual)
    text = (
        f"{share:.0%} of the completions equal another one of their prompt, over {limits.window} "
        f"steps, {usual:.0%} in the first steps"
    )
    return Finding(share, limit, text) if share > limit and not solved(history, limits) else None


@rule(
    "repetition",
    causes="a repeated pattern earns the reward, or completions do not end",
    keys=("reward.path", "loss.kl", "sampling.stop", "reward.overlong_buffer"),
)
def repetition(history: History, limits: Limits) -> Finding | None:
    """Share of repeated 3-grams within completions: risen {repetition_rise} of the way from the
    first steps' share to 1."""
    share, usual = means(history, limits, "diversity/repetition", limits.short)
    limit = usual + limits.repetition_rise * (1 - usual)
    text = f"{share:.0%} of a completion's 3-grams are repetitions, {usual:.0%} in the first steps"
    return Finding(share, limit, text) if share > limit else None


@rule(
    "format instead of content",
    causes="the reward, often a reward model or a judge, pays for lists, headings, bold words or "
    "boxes",
    keys=("reward.path", "reward.model", "loss.kl"),
)
def formatting(history: History, limits: Limits) -> Finding | None:
    """Marks of format in each token: above {marks_share}, and above {marks_factor} x the first
    steps'."""
    share, usual = means(history, limits, "completion/marks", limits.short)
    limit = max(limits.marks_share, limits.marks_factor * usual)
    text = f"{share:.3f} marks of format a token, {usual:.3f} in the first steps"
    return Finding(share, limit, text) if share > limit else None


@rule(
    "completions reach the length limit",
    causes="the reward or the aggregation favours length, or the limit is too low",
    keys=("reward.overlong_buffer", "sampling.max_tokens", "loss.aggregation", "loss.kl"),
)
def length_limit(history: History, limits: Limits) -> Finding | None:
    """Share of truncated completions at least {truncated_share}, and 0.3 above the first steps'."""
    share, usual = means(history, limits, "completion/truncated", limits.short)
    limit = max(limits.truncated_share, usual + 0.3)
    text = f"{share:.0%} of the completions are truncated, {usual:.0%} in the first steps"
    return Finding(share, limit, text) if share >= limit else None


@rule(
    "completions shrink to nothing",
    causes="the reward favours silence: only an empty completion escapes a penalty",
    keys=("reward.path", "loss.kl", "optimizer.learning_rate"),
)
def length_zero(history: History, limits: Limits) -> Finding | None:
    """Completions shorter than {length_factor} x the first steps'."""
    noun = "tokens a completion"
    return fallen(history, limits, "completion_length", limits.length_factor, noun)


@rule(
    "entropy collapse",
    causes="the policy became certain before it solved the task: a tight upper clip, too many "
    "updates per rollout, or a learning rate that is too high",
    keys=("loss.entropy", "loss.clip_high", "optimizer.learning_rate", "loss.kl"),
)
def entropy(history: History, limits: Limits) -> Finding | None:
    """Entropy of the sampled tokens below {entropy_factor} x the first steps', while the task is
    not solved."""
    noun = "nats of entropy a token"
    found = fallen(history, limits, "entropy/sampled", limits.entropy_factor, noun)
    return None if solved(history, limits) else found


@rule(
    "reward and held-out accuracy diverge",
    causes="the policy exploits the training reward or memorizes the prompts",
    keys=("reward.path", "data.path", "loss.kl", "train.steps"),
)
def held_out(history: History, limits: Limits) -> Finding | None:
    """Held-out accuracy {held_out_drop} below its best, while the reward is higher than it was
    then."""
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


@rule(
    "the judge and the reward part",
    causes="the policy exploits the reward, or the judge does not see what the reward pays for",
    keys=("reward.path", "reward.model", "judge.path", "loss.kl"),
)
def judge(history: History, limits: Limits) -> Finding | None:
    """In three judgements together: the judge orders less than {judge_agreement} of the pairs as
    the reward does, or its mean score is below that of three earlier ones by {judge_drop} of the
    range of its scores, while the reward is higher."""
    if not history.last("judge/score", PROBES).size:
        return None
    logged, scores = history.series("judge/score")
    since = int(history.at("judge/step", logged[-PROBES])) - 1
    agreement = history.last("judge/agreement", PROBES)
    if agreement.size and (share := float(agreement.mean())) < limits.judge_agreement:
        text = f"the judge orders {share:.0%} of {PROBES} samples' pairs as the reward does"
        return Finding(share, limits.judge_agreement, text, since)
    rewards = history.series("judge/reward").values
    parts = [slice(end - PROBES, end) for end in range(PROBES, len(scores) + 1)]
    averages = [(fmean(scores[part]), fmean(rewards[part])) for part in parts]
    score, reward = averages[-1]
    lower = [both for both in averages[:-PROBES] if both[1] < reward]
    best, then = max(lower, default=(-math.inf, math.nan))
    lowest = min(history.series("judge/min").values)
    limit = limits.judge_drop * (history.highest("judge/max") - lowest)
    text = (
        f"the judge's mean score fell from {best:.3g} to {score:.3g}, while the reward of the same "
        f"completions rose from {then:.3g} to {reward:.3g}"
    )
    return Finding(best - score, limit, text, since) if best - score > limit else None


@rule(
    "no group has reward variance",
    causes="the prompts are too easy (the run is done) or too hard, or the reward is constant",
    keys=("data.path", "train.dynamic_sampling_rounds", "reward.path", "train.group_size"),
)
def zero_variance(history: History, limits: Limits) -> Finding | None:
    """For {window} steps, no group has completions with different rewards, and there is no teacher
    to learn from."""
    if "kl/teacher" in history.names:
        return None
    flat = history.last("groups/zero_std", limits.window)
    groups = history.last("groups/sampled", limits.window)
    if not flat.size or not groups.size or (flat < groups).any():
        return None
    reward = float(history.last("reward", 1)[0])
    text = f"no group had reward variance over {len(flat)} steps, at a mean reward of {reward:.3g}"
    return Finding(float(flat[-1]), float(groups[-1]), text)


@rule(
    "rewards fail",
    causes="a reward function or an environment that raises, or returns no number, for some "
    "completions; a judge that does not answer in time",
    keys=("reward.path", "environment.name", "reward.timeout"),
)
def failed_rewards(history: History, limits: Limits) -> Finding | None:
    """Share of completions that could not be scored, in training or in the last evaluation: above
    {failed_share}. This rule also judges the first steps."""
    since, limit = history.step - limits.short, limits.failed_share
    recent = [history.between(n, since, history.step) for n in ("reward/failed", "completions")]
    newest = [history.series(n).values[-1:] for n in ("eval/failed", "eval/completions")]
    for where, counts in {"sampled": recent, "held-out": newest}.items():
        failed, of = (float(np.sum(count)) for count in counts)
        if (share := failed / max(of, 1.0)) > limit:
            text = f"{failed:.0f} of {of:.0f} {where} completions could not be scored"
            return Finding(share, limit, text)
    return None


@rule(
    "learner and sampler diverge",
    causes="16-bit arithmetic on longer or less likely completions, stale samples, or weights "
    "that did not reach the sampler; if probe/shape_noise_std is near probe/beta_std, the "
    "shapes of arrays alone, which sums=fixed in precision removes",
    keys=("precision", "rollouts.max_staleness", "loss.correction"),
)
def sequence_mismatch(history: History, limits: Limits) -> Finding | None:
    """Spread of whole completions' log-ratios, before any update, in three probes: above
    {mismatch_nats} nats and twice the mean of the first three.

    The early warning of arXiv:2510.26788.
    """
    noun = "nats of spread in the log-ratio of a completion"
    return grown(history, "probe/sequence_std", floor=limits.mismatch_nats, noun=noun)


@rule(
    "phantom clipping",
    causes="learner and sampler compute in different dtypes, and the clip mistakes the "
    "difference for policy movement",
    keys=("precision", "loss.ratio", "loss.clip_high"),
)
def phantom(history: History, limits: Limits) -> Finding | None:
    """Share of tokens that are clipped because of arithmetic alone, in three probes: above
    {phantom_share}, or above a fifth of it and twice the mean of the first three."""
    steps, values = history.present("probe/phantom")
    noun = "of all tokens are phantom clips"
    if len(steps) >= PROBES and (mean := fmean(values[-PROBES:])) > limits.phantom_share:
        text = f"{mean:.3g} {noun}, over {PROBES} probes"
        return Finding(mean, limits.phantom_share, text, steps[-PROBES] - 1)
    return grown(history, "probe/phantom", floor=limits.phantom_share / 5, noun=noun)


@rule(
    "no finite gradient",
    causes="a loss or reward that is not a number, or 16-bit overflow; the policy learns nothing "
    "meanwhile",
    keys=("loss.name", "reward.path", "precision", "model.path"),
)
def not_finite(history: History, limits: Limits) -> Finding | None:
    """In each of the last {not_finite_steps} steps an update of the policy or the critic was
    skipped because its gradient was not finite. This rule also judges the first steps.

    A loss scale that settles skips fewer.
    """
    for model, prefix in (("policy", ""), ("critic", "value/")):
        steps, _ = history.series(f"{prefix}skipped_steps")
        finite, _ = history.series(f"{prefix}grad_norm")  # a History holds finite values only
        since = finite[-1] if finite else 0
        count = len(steps) - bisect.bisect_right(steps, since)
        if count >= limits.not_finite_steps and steps[-1] == history.step:
            text = f"no finite gradient of the {model} after step {since}, in {count} steps"
            return Finding(count, limits.not_finite_steps, text, since)
    return None


def _no_rise(history: History, limits: Limits) -> Finding | None:
    """Mean reward of the last five steps clearly below the first two's, or not above it while their
    mean KL is above `kl_floor`: updates too large to improve the policy.

    A fall counts from four standard errors, estimated from differences of successive steps. A run
    has ten steps to rise. A solved task needs no rise, and neither does a policy with a teacher.
    """
    rewards = np.array(history.series("reward").values)
    taught = "kl/teacher" in history.names
    if len(rewards) < 2 * _EARLY or taught or solved(history, limits):
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


RULES = {name: found for name, found in globals().items() if isinstance(found, Rule)}
"""The alarm rules by name."""
