"""Minibatches of a step: packed rollouts with training targets and the scores of the loss."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import Advantages, estimate, explained_variance, per_episode
from jaxrl.builders.learner import Learning, given_scores
from jaxrl.core import Minibatch, Rollout, chains, count_bucket, pack_minibatch, plan_rows, unpack
from jaxrl.learner import LearnerState, State
from jaxrl.sharding import fetch
from jaxrl.training.rollouts.collect import greedy_rewards
from jaxrl.training.rollouts.outcomes import LogProbs, add_teacher, shaped_outcomes
from jaxrl.training.run import Run
from jaxrl.training.timing import Numbers


class Targets(NamedTuple):
    """Training targets of rollouts: f32[C] for their tokens, or one advantage for all of them."""

    advantages: Advantages  # for the policy
    values: Sequence[np.ndarray] | None = None  # the critic's predictions; None without one
    returns: Sequence[np.ndarray] | None = None  # the critic's targets; None without one

    def of(self, part: slice) -> "Targets":
        """Returns the targets of some rollouts."""
        values = None if self.values is None else self.values[part]
        returns = None if self.returns is None else self.returns[part]
        return Targets(self.advantages[part], values, returns)


def split_minibatches(count: int, *, updates: int) -> list[slice]:
    """Splits `count` rollouts evenly over updates; with too few, slices are smaller or fewer."""
    size = -(-count // updates)
    return [slice(i, i + size) for i in range(0, count, size)]


class Sequences(NamedTuple):
    """The token sequences of episodes, in order."""

    rollouts: Sequence[Rollout]
    parts: Sequence[slice]  # of each minibatch
    episodes: np.ndarray | None  # see `Outcomes`


def split_sequences(rollouts: Sequence[Rollout], *, updates: int) -> Sequences:
    """Splits episodes evenly over updates, each with all of its sequences."""
    parts = split_minibatches(len(rollouts), updates=updates)
    if not any(r.branches for r in rollouts):
        return Sequences(rollouts, parts, None)
    whole = [chains(rollout) for rollout in rollouts]
    ends = np.cumsum([0, *map(len, whole)]).tolist()
    parts = [slice(ends[p.start], ends[min(p.stop, len(rollouts))]) for p in parts]
    episodes = np.repeat(np.arange(len(whole)), [len(one) for one in whole])
    return Sequences([one for found in whole for one in found], parts, episodes)


def with_room(learning: Learning, given: Sequences) -> Learning:
    """Makes room in the shape of minibatches for further sequences of episodes: a multiple of the
    usual rows by a power of two, so that few programs are compiled."""
    shape, open_shape = learning.shape, dataclasses.replace(learning.shape, max_rows=None)
    if given.episodes is None or shape.max_rows is None:
        return learning
    usual = shape.microbatches(shape.max_rows)
    needed = max(plan_rows(given.rollouts[p], open_shape).microbatches for p in given.parts)
    rows = count_bucket(needed, multiple=usual) * shape.rows_per_microbatch
    return (
        learning
        if needed <= usual
        else learning._replace(shape=dataclasses.replace(shape, max_rows=rows))
    )


def compute_advantages(run: Run, state: State, given: Sequences) -> tuple[Targets, Numbers]:
    """Computes the advantages and, with a critic, its values and targets. `state` is the one before
    any update of this step.

    Raises:
      ValueError: if the advantage asks for greedy completions of a server that sleeps.
    """
    rollouts, parts = given.rollouts, given.parts
    learning, source, policy = run.learning, run.source, state.policy.params
    recipe, divided = learning.recipe, [rollouts[part] for part in parts]
    by_token = functools.partial(score_by_token, learning, divided)

    def logprobs() -> tuple[LogProbs, LogProbs]:
        mine = by_token(functools.partial(learning.learner.score, policy))
        # Parts come in the order in which they are scored.
        left = iter(divided)
        theirs = by_token(
            lambda minibatch: learning.scores(
                "reference", policy, rollouts=next(left), minibatch=minibatch
            )
        )
        return mine, theirs

    def greedy() -> np.ndarray:
        if source.config.sampler.sleep:
            raise ValueError(
                "sampler.sleep = true, and the advantage asks the sleeping server for greedy "
                "completions; leave sampler.sleep out, or choose another loss.advantage"
            )
        return run.hosts.on_leader(lambda: greedy_rewards(source, rollouts))

    outcomes, numbers = shaped_outcomes(
        source.config,
        rollouts,
        weights=source.task.weights,
        logprobs=logprobs,
        greedy=greedy,
        episodes=given.episodes,
    )
    outcomes = dataclasses.replace(
        outcomes, energies=lambda: by_token(functools.partial(learning.learner.energies, policy))
    )
    values = returns = None
    if learning.critic is not None and recipe.critic is not None:
        around = by_token(functools.partial(learning.critic.values, state))
        values = [before for before, _ in (one.T for one in around)]
        cuts = [one[-1, 1] if r.truncated else 0.0 for one, r in zip(around, rollouts, strict=True)]
        outcomes = dataclasses.replace(outcomes, values=values, cuts=np.array(cuts))
        returns = list(per_episode(recipe.critic.returns, outcomes))
        numbers["value/explained_variance"] = explained_variance(returns, outcomes)
    advantages = estimate(recipe.advantages, outcomes)
    advantages, taught = add_teacher(source.config.reward, rollouts, advantages)
    return Targets(advantages, values, returns), numbers | taught


def score_by_token(
    learning: Learning, parts: Iterable[Sequence[Rollout]], score: Callable[[Minibatch], jax.Array]
) -> list[np.ndarray]:
    """Scores the rollouts of minibatches: f32[C], or f32[C, ...], for each."""
    found: list[np.ndarray] = []
    for rollouts in parts:
        minibatch = pack_minibatch(rollouts, [0.0] * len(rollouts), shape=learning.shape)
        found += unpack(fetch(score(minibatch)), rollouts, shape=learning.shape)
    return found


def prepare_minibatch(
    learning: Learning,
    policy: LearnerState,
    *,
    rollouts: Sequence[Rollout],
    targets: Targets,
    updates: int,
) -> Minibatch:
    """Packs a minibatch and adds its `given_scores`."""
    minibatch = pack_minibatch(
        rollouts,
        list(targets.advantages),
        shape=learning.shape,
        values=targets.values,
        returns=targets.returns,
    )
    scores: dict[str, Any] = {
        name: learning.scores(name, policy.params, rollouts=rollouts, minibatch=minibatch)
        for name in given_scores(learning.recipe, updates=updates)
    }
    return dataclasses.replace(minibatch, **scores)


def with_coefficients(minibatch: Minibatch, coefficients: Mapping[str, float]) -> Minibatch:
    """Adds the coefficients of terms that controllers steer to a minibatch."""
    arrays = {
        name: jnp.full_like(minibatch.batch.advantages, coefficient)
        for name, coefficient in coefficients.items()
    }
    batch = dataclasses.replace(minibatch.batch, coefficients=arrays)
    return dataclasses.replace(minibatch, batch=batch)
