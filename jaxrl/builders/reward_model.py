"""The reward model of a run, as its config says."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.builders.model import load_scorer
from jaxrl.config.training import Config
from jaxrl.core.batch import Rollout
from jaxrl.core.packing import MinibatchShape, pack_minibatch, plan_rows
from jaxrl.data.prompts import Tokenizer
from jaxrl.learner.reward_model import Scores, make_scores
from jaxrl.models import huggingface
from jaxrl.models.spec import Params
from sharding.partition import Layout
from sharding.transfer import fetch

Judge = Callable[[Sequence[Rollout]], np.ndarray]
"""Rollouts -> what each is worth, f64[N]."""


def load_judge(config: Config, path: str, tokenizer: Tokenizer, *, layout: Layout) -> Judge:
    """What the reward model of a run thinks of rollouts, computed on the learner's devices in
    `precision.compute`.

    Args:
      config: of the run; rows and microbatches are those of its learner.
      path: the reward model's directory.
      tokenizer: the policy's.
      layout: of the learner.

    Raises:
      ValueError: if it is no reward model, or its token ids mean something else; the message says
        what differs.
    """
    if not huggingface.load_config(path).scored:
        raise ValueError(
            f"reward.model = {path!r} is a language model, which scores nothing; make a reward "
            "model of it with jaxrl reward-model"
        )
    policy = config.policy
    model, params = load_scorer(path, layout=layout, dtype=policy.compute)
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
    judge = RewardModel(
        params=params,
        scores=jax.jit(scores),
        shape=MinibatchShape(
            row_length=config.row_length,
            rows_per_microbatch=config.microbatch_rows,
            sharding=layout.batch(("batch", "length")),
        ),
    )
    return functools.partial(rate, judge)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward model on the learner's devices.

    Attributes:
      params: in `precision.compute`.
      scores: compiled.
      shape: of its minibatches.
    """

    params: Params
    scores: Scores
    shape: MinibatchShape


class _Seat(NamedTuple):
    row: int
    segment: int


def rate(model: RewardModel, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The reward of each prompt with its answer, f64[N]; NaN where it is not finite."""
    # Room for the worst case, one sequence to a row, so that it compiles once.
    shape = dataclasses.replace(model.shape, max_rows=len(rollouts))
    minibatch = pack_minibatch(rollouts, [0.0] * len(rollouts), shape=shape)
    scores = np.asarray(fetch(model.scores(model.params, minibatch)), np.float64)
    rows = plan_rows(rollouts, shape).members
    seats = {i: _Seat(r, s) for r, row in enumerate(rows) for s, i in enumerate(row, start=1)}
    values = np.array([scores[seats[i]] for i in range(len(rollouts))])
    return np.where(np.isfinite(values), values, np.nan)


def check_vocabulary(path: str, *, own: Tokenizer, policy: Tokenizer, vocab_size: int) -> None:
    """Checks that token ids mean the same to the reward model as to the policy.

    Args:
      path: of the reward model, for the message.
      own: the reward model's tokenizer.
      policy: the policy's.
      vocab_size: rows of the reward model's embedding.

    Raises:
      ValueError: if they do not; the message names the first difference.
    """
    ours, theirs = policy.get_vocab(), own.get_vocab()
    differing = sorted(t for t in {**ours, **theirs} if ours.get(t) != theirs.get(t))
    if differing:
        token = differing[0]
        raise ValueError(
            f"reward.model = {path!r}: its tokenizer is not the policy's, and it is given the "
            f"sampled token ids as they are; {len(differing)} tokens differ, such as {token!r}: "
            f"{theirs.get(token)} there and {ours.get(token)} here. Train one from this model"
        )
    if (highest := max(ours.values())) >= vocab_size:
        raise ValueError(
            f"reward.model = {path!r}: its embedding has {vocab_size} entries, and the policy's "
            f"tokenizer has the token id {highest}"
        )
