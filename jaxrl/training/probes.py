"""Runs diagnostics before the update: the alpha/beta split and logged samples."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxrl.advantages import Advantages
from jaxrl.core import Minibatch, Rollout, unpack
from jaxrl.diagnostics import (
    log_ratio_parts,
    moments,
    replay_batch,
    shape_noise,
    split,
    split_log_ratio,
)
from jaxrl.models import Params
from jaxrl.sharding import fetch
from jaxrl.training.run import Run
from jaxrl.training.timing import Numbers, is_due


def run_probes(
    run: Run,
    params: Params,
    *,
    rollouts: Sequence[Rollout],
    advantages: Advantages,
    minibatch: Minibatch,
    step: int,
) -> Numbers:
    """Probes a minibatch of the step after `step` and logs some of its rollouts, if either is due;
    returns the metrics of the probe. `params` are those before any update of this step."""
    numbers, by_token = _split_ratio(run, params, rollouts=rollouts, minibatch=minibatch, step=step)
    if run.samples is not None and is_due(run.config.samples.every, step):
        shape = run.learning.shape
        probed = {name: unpack(x, rollouts, shape=shape) for name, x in by_token.items()}
        run.samples.write(step + 1, rollouts, advantages=advantages, probed=probed)
    return numbers


def _split_ratio(
    run: Run, params: Params, *, rollouts: Sequence[Rollout], minibatch: Minibatch, step: int
) -> tuple[Numbers, dict[str, np.ndarray]]:
    """Splits the log-ratio into alpha (policy change) and beta (rounding); measures the shape noise
    before the first update.

    Returns:
      (metrics, {"betas": learner - shadow, "entropies": of the shadow}, f32[N, T] in nats);
      ({}, {}) if it is not due.
    """
    c, batch, learner = run.config.probe, minibatch.batch, run.learning.learner
    if not is_due(c.every, step):
        return {}, {}
    parts = split(learner, minibatch, params=params)
    tokens = parts.tokens()
    by_token = {"betas": parts.learner - parts.shadow, "entropies": parts.entropies}
    if not tokens.learner.size:
        return {}, by_token
    low, high = c.clip_range
    found = split_log_ratio(tokens, low=low, high=high)
    if run.learning.drift is not None:
        bare = dataclasses.replace(minibatch, anchor=None, reference=None)
        found["drift"] = float(fetch(run.learning.drift(params, bare)))
    if step == 0:
        noise = shape_noise(
            functools.partial(learner.score, params),
            rollouts,
            shape=run.learning.shape,
            scores=parts.learner,
        )
        found |= moments("shape_noise", noise)
    # A fetch needs all processes; the first asks the servers.
    ids, until = fetch((batch.tokens, batch.seen_until)) if c.replay else (None, None)
    if ids is not None and run.score is not None:
        replay = replay_batch(run.score, tokens=ids, segments=parts.segments, seen_until=until)
        found |= log_ratio_parts(parts, replay=replay)
    return {f"probe/{name}": value for name, value in found.items()}, by_token
