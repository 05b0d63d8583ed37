"""The two forms in which samples travel: ragged on the host, rectangular on the device."""

import base64
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

pass

End = Literal["done", "max_tokens", "max_turns", "error", "timeout", "invalid"]
"""How an episode ended: by the environment, at the limit of tokens or turns, or because the
environment raised, timed out or returned something invalid."""


class Episode(NamedTuple):
    """How an answer of several turns came about.

    Attributes:
      turns: for each turn where it begins and ends in the completion, and its reward.
      end: how it ended.
      metrics: of the environment.
    """

    turns: tuple[tuple[int, int, float], ...]
    end: End
    metrics: Mapping[str, float]

    @property
    def failed(self) -> bool:
        """Whether the environment failed, so that nothing can be learnt from it."""
        return self.end in ("error", "timeout", "invalid")


class Rollout(NamedTuple):
    """One sampled answer, as the sampler and the environment left it (host, ragged).

    Attributes:
      prompt: i32[P] token ids that the policy was given.
      completion: i32[C] token ids that followed; EOS stays.
      logprobs: f32[C] log-probability of each completion token under the distribution it was
        sampled from; NaN where the sampler reported none.
      action_mask: bool[C], whether the policy chose the token (tool output is False).
      version: i32[C] policy version that sampled each token; at a token that the policy did not
        choose that of the token before.
      group: number of the prompt; answers to one prompt share it and others have another.
      reward: scalar reward; NaN if it could not be computed.
      components: what each reward function gave, before its weight; NaN where it failed.
      truncated: whether the answer ended because it ran out of tokens, or of turns.
      episode: how it came about; None for an answer of one turn without an environment.
      experts: [N, L, k], where the sampler's layers sent the first N tokens of prompt and
        completion, all but the last one as a rule; None where it did not say.
    """

    prompt: np.ndarray
    completion: np.ndarray
    logprobs: np.ndarray
    action_mask: np.ndarray
    version: np.ndarray
    group: int
    reward: float = float("nan")
    components: tuple[float, ...] = ()
    truncated: bool = False
    episode: Episode | None = None
    experts: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Number of prompt and completion tokens."""
        return len(self.prompt) + len(self.completion)


@struct.dataclass(kw_only=True)
class TokenBatch:
    """Tokens in rows, several sequences to a row (device, rectangular).

    Entry t of every per-token array belongs to `tokens[:, t]` and scores that token given the
    tokens of the same segment before it. Padding has segment 0 and action_mask False; where
    action_mask is False, log-probs and advantages are 0.
    """

    tokens: jax.Array  # i32[B, T]
    segments: jax.Array  # i32[B, T], 1, 2, ... for the sequences of a row, 0 for padding
    positions: jax.Array  # i32[B, T], from 0 within a segment
    action_mask: jax.Array  # bool[B, T], tokens that the policy chose
    sampler_logprobs: jax.Array  # f32[B, T], NaN where the sampler reported none
    advantages: jax.Array  # f32[B, T]
    rewards: jax.Array | None = None  # f32[B, T], of the answer; 0 where it is not known
    values: jax.Array | None = None  # f32[B, T], of the critic before it learns from the batch
    returns: jax.Array | None = None  # f32[B, T], what the critic should have expected
    entropy_weights: jax.Array | None = None  # f32[B, T], of an adaptive entropy bonus
    # i16[B, T, L, k], where the sampler's layers sent the token itself; -1 where that is not known.
    experts: jax.Array | None = None


def segment_sum(values: jax.Array, segments: jax.Array) -> jax.Array:
    """Sum over each token's own sequence, at each token: [B, T] -> [B, T]; 0 at padding."""
    totals = segment_totals(jnp.where(segments > 0, values, 0), segments)
    return jnp.where(segments > 0, jnp.take_along_axis(totals, segments, axis=1), 0)


def action_tokens(batch: TokenBatch) -> jax.Array:
    """Number of tokens that the policy chose in the whole batch, f32[]."""
    return jnp.sum(batch.action_mask, dtype=jnp.float32)


def sequence_weights(batch: TokenBatch) -> jax.Array:
    """1 / (action tokens of the sequence) at each action token, 0 elsewhere: f32[B, T]; sums to the
    number of sequences that have an action token."""
    mask = batch.action_mask.astype(jnp.float32)
    lengths = segment_sum(mask, batch.segments)
    return mask / jnp.maximum(lengths, 1.0)


def action_sequences(batch: TokenBatch) -> jax.Array:
    """Number of sequences with at least one action token in the whole batch, f32[]."""
    counts = segment_totals(batch.action_mask.astype(jnp.float32), batch.segments)
    return jnp.sum(counts > 0, dtype=jnp.float32)


def segment_totals(values: jax.Array, segments: jax.Array) -> jax.Array:
    """Sum over each sequence: [B, T] -> [B, T + 1]; entry s of a row is that of its segment s."""
    empty = jnp.zeros((segments.shape[0], segments.shape[1] + 1), values.dtype)
    return jax.vmap(lambda zeros, s, v: zeros.at[s].add(v))(empty, segments, values)


def to_json(rollout: Rollout) -> dict[str, Any]:
    """An answer for a checkpoint, bit for bit."""
    return {
        name: [value.dtype.name, base64.b64encode(value.tobytes()).decode(), *value.shape[1:]]
        if isinstance(value, np.ndarray)
        else value
        for name, value in rollout._asdict().items()
    }


def from_json(content: Mapping[str, Any]) -> Rollout:
    """The inverse of `to_json`."""
    fields: dict[str, Any] = dict(content)
    for name in ("prompt", "completion", "logprobs", "action_mask", "version", "experts"):
        if fields.get(name) is not None:
            dtype, data, *rest = fields[name]
            fields[name] = np.frombuffer(base64.b64decode(data), dtype).reshape(-1, *rest)
    fields["components"] = tuple(fields["components"])
    if fields.get("episode") is not None:
        turns, end, numbers = fields["episode"]
        fields["episode"] = Episode(tuple(map(tuple, turns)), end, numbers)
    return Rollout(**fields)


@struct.dataclass(kw_only=True)
class Minibatch:
    """What one optimizer step learns from.

    The rows of `batch` are those of `max_microbatches` microbatches, interleaved as
    `interleave` leaves them; only the first `microbatches` of them are computed, so one compiled
    step serves every number of rows. A score that no loss needs is None.
    """

    batch: TokenBatch  # [N, T]
    microbatches: jax.Array  # i32[]
    anchor: jax.Array | None = None  # f32[N, T]
    reference: jax.Array | None = None  # f32[N, T]
