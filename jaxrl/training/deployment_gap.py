"""Log-probs of held-out completions by the learner, beside the sampler's of the same weights."""

from collections.abc import Sequence

import numpy as np

from jaxrl.core import Rollout
from jaxrl.diagnostics import mean_and_interval
from jaxrl.training.minibatches import score_by_token
from jaxrl.training.run import Run
from jaxrl.training.timing import Numbers


def deployment_gap(run: Run, params: object, *, rollouts: Sequence[Rollout]) -> Numbers:
    """Compares the log-probs of greedy rollouts, which were sampled with the weights `params`.

    All processes must call it.

    Returns:
      "logprob": the sampler's mean log-prob, and "deployment_gap": the learner's minus the
      sampler's, both in nats a token; "deployment_gap/interval": half the width of its 95 %
      confidence interval. {} if no rollout has a log-prob.
    """
    learning, size = run.learning, run.config.minibatch_completions
    parts = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
    scored = score_by_token(learning, parts, lambda batch: learning.greedy_score(params, batch))
    gaps, sums, counts = [], [], []
    for rollout, mine in zip(rollouts, scored, strict=True):
        known = rollout.action_mask & ~np.isnan(rollout.logprobs)
        theirs = rollout.logprobs[known].astype(np.float64)
        gaps.append((mine[known] - theirs).sum())
        sums.append(theirs.sum())
        counts.append(known.sum())
    if not sum(counts):
        return {}
    gap, interval = mean_and_interval(np.array(gaps), np.array(counts))
    numbers = {"logprob": float(sum(sums) / sum(counts)), "deployment_gap": gap}
    return numbers if np.isnan(interval) else numbers | {"deployment_gap/interval": interval}
