"""A trained reward model as a reward: it reads the token ids that were sampled, never text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.batch import Rollout, assign_rows, pack
from jaxrl.core.precision import Precision, cast
from jaxrl.data.prompts import Tokenizer
from jaxrl.learner.policy import Minibatch, interleave
from jaxrl.learner.update import by_microbatch, constrainer
from jaxrl.models.decoder import Model
from jaxrl.models.scorer import sequence_scores
from jaxrl.models.spec import Params
from sharding.transfer import fetch, place

# (parameters, minibatch of N rows) -> f32[N, T + 1]: the score of each row's sequences 1, 2, ...
Scores = Callable[[Params, Minibatch], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward model on the learner's devices.

    Attributes:
      params: in `precision.compute`.
      scores: compiled.
      sharding: of a batch.
      row_length: tokens in a row.
      rows_per_microbatch: rows that are computed at once.
    """

    params: Params
    scores: Scores
    sharding: Any
    row_length: int
    rows_per_microbatch: int


class _Seat(NamedTuple):
    row: int
    segment: int


def make_scores(
    model: Model, *, precision: Precision, rows_per_microbatch: int, param_shardings: Any = None
) -> Scores:
    """The function that scores batches, to be compiled by the caller.

    Args:
      model: a scorer.
      precision: the dtype policy; parameters are cast to `compute`.
      rows_per_microbatch: rows that are computed at once; divides the rows of every minibatch.
      param_shardings: tree of shardings that the cast parameters keep; None on a single device.
    """
    constrain = constrainer(param_shardings)

    def one(weights: Params, batch: Any) -> jax.Array:
        return sequence_scores(model, weights, batch, precision=precision)

    def scores(params: Params, minibatch: Minibatch) -> jax.Array:
        weights = constrain(cast(params, precision.compute))
        every = by_microbatch(
            one, rows_per_microbatch=rows_per_microbatch, microbatches=minibatch.microbatches
        )
        return every(weights, minibatch.batch)

    return scores


def rate(model: RewardModel, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The reward of each prompt with its answer, f64[N]; NaN where it is not finite."""
    rows = assign_rows([r.length for r in rollouts], row_length=model.row_length)
    # Room for the worst case, one sequence to a row, so that it compiles once.
    most = -(-len(rollouts) // model.rows_per_microbatch)
    placed, used = interleave(
        rows, rows_per_microbatch=model.rows_per_microbatch, max_microbatches=most
    )
    batch = pack(rollouts, [0.0] * len(rollouts), rows=placed, row_length=model.row_length)
    minibatch = Minibatch(batch=place(batch, model.sharding), microbatches=jnp.int32(used))
    scores = np.asarray(fetch(model.scores(model.params, minibatch)), np.float64)
    seats = {i: _Seat(r, s) for r, row in enumerate(placed) for s, i in enumerate(row, start=1)}
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
