"""Thresholds of the alarm rules."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds of the alarm rules, with which healthy runs raise no alarm
    (docs/results/operating.md, "False alarms and hits")."""

    warmup: int = 20  # first steps, with which later ones are compared
    window: int = 20  # steps to compare with, and steps of silence after an alarm
    kl_factor: float = 5.0  # times the window's median
    kl_floor: float = 0.1  # nats per token; a smaller KL never raises an alarm
    gradient_factor: float = 5.0  # times the window's median
    gradient_floor: float = 0.1  # a smaller gradient norm never raises an alarm
    clip_share: float = 0.1  # of tokens; a smaller one never raises an alarm
    clip_factor: float = 5.0  # times the share of the first steps
    distinct_factor: float = 0.3  # times the share of the first steps
    identical_rise: float = 0.9  # fraction of the way from the first steps' share to 1
    repetition_rise: float = 0.5  # as identical_rise
    marks_share: float = 0.05  # marks of format in each token; fewer never raise an alarm
    marks_factor: float = 3.0  # times the marks of the first steps
    truncated_share: float = 0.5  # of completions
    length_factor: float = 0.1  # times the length of the first steps
    entropy_factor: float = 0.1  # times the entropy of the first steps
    held_out_drop: float = 0.1  # below the best accuracy
    judge_agreement: float = 0.6  # pairs that a judge orders as the reward does
    judge_drop: float = 0.2  # of the range of a judge's scores
    failed_share: float = 0.1  # of completions
    mismatch_nats: float = 0.5  # spread of the log-ratios of whole completions
    phantom_share: float = 0.05  # of tokens
    # Consecutive skipped updates. A dynamic loss scale that starts too high skips a few and
    # settles: ten take it from 65536 to 64.
    not_finite_steps: int = 10

    @property
    def short(self) -> int:
        """Steps to average over where single steps are noisy."""
        return max(1, self.window // 4)


LIMITS = Limits()
"""The thresholds of every run."""
