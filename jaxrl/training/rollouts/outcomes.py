"""What advantages are made of: rewards, what is added to them, and what they are compared with.

The metric "reward" is the task's; penalties for length and for distance from the reference come in
here and are metrics of their own.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import Outcomes
from jaxrl.core.batch import Rollout
from jaxrl.data import prompts
from jaxrl.losses.from_config import kl_estimator
from jaxrl.models import lora
from jaxrl.models.spec import Params
from jaxrl.sampling.embedded.buckets import count_bucket
from jaxrl.training.rollouts.answers import Numbers, reward
from jaxrl.training.rollouts.draw import draw
from jaxrl.training.run import Run

LogProbs = Callable[[Params], Sequence[np.ndarray]]
"""Parameters -> their log-probs of the tokens of each answer, f32[C]."""


def outcomes(
    run: Run, rollouts: Sequence[Rollout], *, params: Params, logprobs: LogProbs
) -> tuple[Outcomes, Numbers]:
    """What is known of the answers, and the metrics of what was added to their rewards.

    Args:
      run: the parts of the run.
      rollouts: with their rewards.
      params: of the learner.
      logprobs: scores the rollouts; called only for a penalty on distance from the reference.
    """
    c = run.config.reward
    rewards = np.array([r.reward for r in rollouts])
    components = np.array([r.components for r in rollouts]).reshape(len(rollouts), -1).T
    weights = run.reward_weights
    named = dict(zip(weights, components, strict=False))
    numbers: Numbers = {}
    if c.overlong_buffer:
        lengths = np.array([len(r.completion) for r in rollouts])
        longest = run.config.sampling.max_tokens
        overlong = overlong_penalty(lengths, longest=longest, buffer=c.overlong_buffer)
        rewards = rewards + overlong
        named, weights = named | {"overlong": overlong}, weights | {"overlong": 1.0}
        numbers["reward/overlong"] = float(overlong.mean())
    penalties = None
    if c.kl and run.reference is not None:
        penalties = kl_penalties(
            learner=logprobs(params),
            reference=logprobs(lora.with_trainable(params, run.reference)),
            masks=[r.action_mask for r in rollouts],
            coefficient=c.kl,
            estimator=c.kl_estimator,
        )
        paid = np.array([p.sum() for p in penalties])
        rewards = rewards - paid
        numbers["reward/kl"] = -float(paid.mean())
    return Outcomes(
        rewards=rewards,
        groups=np.array([r.group for r in rollouts]),
        action_masks=[r.action_mask for r in rollouts],
        components=named,
        weights=weights,
        penalties=penalties,
        turns=_turns(run, rollouts),
        greedy=lambda: run.hosts.led(lambda: greedy_rewards(run, rollouts)),
    ), numbers


def _turns(run: Run, rollouts: Sequence[Rollout]) -> list[list[tuple[int, int, float]]] | None:
    """Those of episodes, with the environment's rewards as they count."""
    if run.episode_runner is None:
        return None
    weight, episodes = run.config.environment.weight, [r.episode for r in rollouts]
    return [
        [(start, end, weight * earned) for start, end, earned in (e.turns if e else ())]
        for e in episodes
    ]


def overlong_penalty(lengths: np.ndarray, *, longest: int, buffer: int) -> np.ndarray:
    """0 up to longest - buffer tokens, from there linearly down to -1 at `longest`: f64[N].

    DAPO, arXiv:2503.14476.

    Args:
      lengths: i[N], tokens of each answer.
      longest: tokens that an answer may have.
      buffer: tokens over which the penalty grows.
    """
    return np.minimum((longest - buffer - np.asarray(lengths)) / buffer, 0.0)


def kl_penalties(
    *,
    learner: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    coefficient: float,
    estimator: str,
) -> list[np.ndarray]:
    """For each answer f64[C]: coefficient x the estimate of the learner's divergence from the
    reference at each token that the policy chose, 0 at the others."""
    if not masks:
        return []
    here, there, chosen = (np.concatenate(arrays) for arrays in (learner, reference, masks))
    # Of a size that recurs: each size compiles anew, and no two rollouts have the same one.
    apart = np.zeros(count_bucket(len(chosen), multiple=1024), np.float32)
    apart[: len(chosen)] = there - here
    estimates = np.asarray(kl_estimator(estimator)(jnp.asarray(apart)), float)[: len(chosen)]
    ends = np.cumsum([len(mask) for mask in masks])[:-1]
    return np.split(np.where(chosen, coefficient * estimates, 0.0), ends)


def greedy_rewards(run: Run, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The whole reward of the greedy answer to each rollout's prompt, f64[N]; NaN where a reward
    function failed."""
    numbers = sorted({r.group for r in rollouts})
    every, seed = run.prompts.examples, run.config.seed
    examples = {
        number: every[prompts.next_indices(len(every), position=number, count=1, seed=seed)[0]]
        for number in numbers
    }
    greedy = dataclasses.replace(run.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    answers = [rollout for _, rollout in draw(run, examples, greedy, group_size=1)]
    earned = {r.group: r.reward for r in reward(run, answers, examples)}
    return np.array([earned[r.group] for r in rollouts])
