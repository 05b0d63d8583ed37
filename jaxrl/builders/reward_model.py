"""Loads the reward model that a config names."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.builders.model import load_model
from jaxrl.config.training import Config
from jaxrl.core.batch import Rollout
from jaxrl.core.packing import MinibatchShape, pack_minibatch, plan_rows
from jaxrl.data.prompts import Tokenizer
from jaxrl.learner.reward_model import Scores, make_scores
from jaxrl.models import huggingface
from jaxrl.models.spec import Params
from sharding.partition import Layout
from sharding.transfer import fetch

RewardModel = Callable[[Sequence[Rollout]], np.ndarray]
"""Rollouts -> the reward of each, f64[N]."""


def load_reward_model(config: Config, tokenizer: Tokenizer, *, layout: Layout) -> RewardModel:
    """Loads the reward model of a run, whose policy has the tokenizer. It runs on the learner's
    devices in `precision.compute`; rows and microbatches are the learner's.

    Raises:
      ValueError: if it is not a reward model, or its tokenizer is not the policy's.
    """
    path = config.reward.model
    assert path is not None
    if not huggingface.load_config(path).scored:
        raise ValueError(
            f"reward.model = {path!r} is a language model, which has no scores; train a reward "
            "model from it with `jaxrl reward-model`"
        )
    policy = config.policy
    model, params = load_model(path, layout=layout, dtype=policy.compute, output="scores")
    check_vocabulary(
        path,
        own=huggingface.load_tokenizer(path),
        policy=tokenizer,
        vocab_size=model.config.vocab_size,
    )
    scores = make_scores(
        model,
        precision=policy,
        rows_per_microbatch=config.microbatch_rows,
        param_shardings=layout.tree(model.specs) if layout.mesh.size > 1 else None,
    )
    compiled = CompiledRewardModel(
        params=params,
        scores=jax.jit(scores),
        shape=MinibatchShape(
            row_length=config.row_length,
            rows_per_microbatch=config.microbatch_rows,
            sharding=layout.batch(("batch", "length")),
        ),
    )
    return functools.partial(score_rollouts, compiled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledRewardModel:
    """A compiled reward model.

    Attributes:
      params: in `precision.compute`.
      scores: compiled.
      shape: of its minibatches.
    """

    params: Params
    scores: Scores
    shape: MinibatchShape


class _Place(NamedTuple):
    row: int
    segment: int


def score_rollouts(model: CompiledRewardModel, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns the reward of each rollout, f64[N]; NaN where it is not finite."""
    # Sized for the worst case, one sequence per row, so that it compiles once.
    shape = dataclasses.replace(model.shape, max_rows=len(rollouts))
    minibatch = pack_minibatch(rollouts, [0.0] * len(rollouts), shape=shape)
    scores = np.asarray(fetch(model.scores(model.params, minibatch)), np.float64)
    rows = plan_rows(rollouts, shape).members
    places = {i: _Place(r, s) for r, row in enumerate(rows) for s, i in enumerate(row, start=1)}
    values = np.array([scores[places[i]] for i in range(len(rollouts))])
    return np.where(np.isfinite(values), values, np.nan)


def check_vocabulary(path: str, *, own: Tokenizer, policy: Tokenizer, vocab_size: int) -> None:
    """Checks that the reward model has the policy's tokenizer.

    Args:
      path: of the reward model, for the message.
      own: the reward model's tokenizer.
      policy: the policy's.
      vocab_size: rows of the reward model's embedding.

    Raises:
      ValueError: if it has not; the message names the first difference.
    """
    ours, theirs = policy.get_vocab(), own.get_vocab()
    differing = sorted(t for t in {**ours, **theirs} if ours.get(t) != theirs.get(t))
    if differing:
        token = differing[0]
        raise ValueError(
            f"reward.model = {path!r} reads the policy's token ids, but its tokenizer is not the "
            f"policy's: {len(differing)} tokens differ, such as {token!r} with the id "
            f"{theirs.get(token)} there and {ours.get(token)} here; train a reward model from this "
            "policy"
        )
    if (highest := max(ours.values())) >= vocab_size:
        raise ValueError(
            f"reward.model = {path!r} has {vocab_size} embeddings, but the policy's tokenizer has "
            f"the token id {highest}; train a reward model from this policy"
        )
