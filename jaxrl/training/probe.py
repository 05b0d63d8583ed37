"""What a run looks at before it learns: the log-ratio taken apart, and a few answers to be read."""

from collections.abc import Sequence

import numpy as np

from jaxrl.advantages import Advantages
from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.learner.policy import LearnerState
from jaxrl.monitoring.ratio.replay import log_ratio_parts, replay_batch, summarize_parts
from jaxrl.monitoring.ratio.split import known_tokens, split_log_ratio
from jaxrl.training.minibatches import unpacked
from jaxrl.training.rollouts.answers import Numbers
from jaxrl.training.run import Run
from sharding.transfer import fetch


def observe(
    run: Run,
    state: LearnerState,
    rollouts: Sequence[Rollout],
    advantages: Advantages,
    minibatch: Minibatch,
    *,
    step: int,
) -> Numbers:
    """Probes a mini-batch and keeps some of its answers, in the steps in which that is due.

    Args:
      run: the parts of the run.
      state: of the policy, before any update of this step.
      rollouts: the answers of the mini-batch.
      advantages: theirs.
      minibatch: the same, packed.
      step: rollouts trained on before this one.

    Returns:
      The metrics of the probe.
    """
    numbers, beta = _probe(run, state, minibatch, step=step)
    if run.samples.due(step):
        betas = None if beta is None else unpacked(run, rollouts, beta)
        run.samples.write(step + 1, rollouts, advantages=advantages, betas=betas)
    return numbers


def _probe(
    run: Run, state: LearnerState, minibatch: Minibatch, *, step: int
) -> tuple[Numbers, np.ndarray | None]:
    """The log-ratio taken apart into policy and arithmetic: metrics, and beta f32[N, T], None where
    it is not due."""
    c, batch = run.config.probe, minibatch.batch
    if not c.every or step % c.every:
        return {}, None
    arrays = fetch(
        {
            "learner": run.learner.score(state.params, minibatch),
            "shadow": run.learner.shadow(state.params, minibatch),
            "sampler": batch.sampler_logprobs,
        }
    )
    mask, segments, advantages = fetch((batch.action_mask, batch.segments, batch.advantages))
    tokens = known_tokens(**arrays, advantages=advantages, mask=mask, segments=segments)
    beta = arrays["learner"] - arrays["shadow"]
    if not tokens.learner.size:
        return {}, beta
    found = split_log_ratio(tokens, low=c.low, high=c.high)
    ids = fetch(batch.tokens) if c.replay else None  # by all processes; one of them asks servers
    if ids is not None and run.replay is not None:
        replay = replay_batch(run.replay, tokens=ids, segments=segments)
        three = log_ratio_parts(replay=replay[mask], **{k: v[mask] for k, v in arrays.items()})
        found |= summarize_parts(three)
    return {f"probe/{name}": value for name, value in found.items()}, beta
