"""Samples: ragged on the host (`Rollout`), rectangular on the device (`TokenBatch`)."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.core.runs import Runs

End = Literal["done", "max_tokens", "max_turns", "error", "timeout", "invalid"]
"""The reason an episode ended: the environment finished it, it reached the limit of tokens or of
turns, or the environment raised, timed out or returned an invalid step."""


class Episode(NamedTuple):
    """The course of a multi-turn rollout."""

    turns: tuple[tuple[int, int, float], ...]  # start, end (positions in the completion), reward
    end: End
    metrics: Mapping[str, float]  # the environment's

    @property
    def failed(self) -> bool:
        """True if the environment failed, so that the rollout cannot be trained on."""
        return self.end in ("error", "timeout", "invalid")


class Rollout(NamedTuple):
    """One sampled completion with its prompt and reward (host, ragged).

    `logprobs` are NaN where the sampler reported none. `version` is the policy version that sampled
    the token; a token that the policy did not choose has the version of the token before it.
    `experts` are the sampler's routing of the first N tokens of prompt and completion, usually all
    but the last; None if it was not recorded. `teacher` are log-probs under a teacher, NaN where it
    gave none; None without a teacher. `kept` are the tokens that truncated sampling kept, records
    of `core.kept`; None if nothing was truncated.
    """

    prompt: np.ndarray  # i32[P], token ids
    completion: np.ndarray  # i32[C], token ids after the prompt; EOS included
    logprobs: np.ndarray  # f32[C], of the distribution that each token was sampled from
    action_mask: np.ndarray  # bool[C], true at tokens that the policy chose (false at tool output)
    version: np.ndarray  # i32[C]
    group: int  # number of the prompt, shared by all completions of it
    reward: float = float("nan")  # NaN if it could not be computed
    components: tuple[float, ...] = ()  # parts of the reward, before their weights; NaN if failed
    truncated: bool = False  # the completion ended at the limit of tokens or of turns
    episode: Episode | None = None  # None for a single turn without an environment
    experts: np.ndarray | None = None  # [N, L, k]
    teacher: np.ndarray | None = None  # f32[C]
    kept: np.ndarray | None = None  # u8[C, 32]
    # Further sequences of the episode, see `chains`; each token is an action of one sequence alone.
    branches: "tuple[Rollout, ...]" = ()

    @property
    def length(self) -> int:
        """Number of prompt and completion tokens."""
        return len(self.prompt) + len(self.completion)


def given_rollout(prompt: Sequence[int], completion: Sequence[int]) -> Rollout:
    """Returns a rollout of a data set's token ids: all are actions, and their log-probs are NaN."""
    size = len(completion)
    return Rollout(
        prompt=np.asarray(prompt, np.int32),
        completion=np.asarray(completion, np.int32),
        logprobs=np.full(size, np.nan, np.float32),
        action_mask=np.ones(size, bool),
        version=np.zeros(size, np.int32),
        group=0,
    )


def chains(rollout: Rollout) -> list[Rollout]:
    """Returns the sequences of an episode in the order of their last turns; usually there is one.

    They share its reward. All are masked if the rollout is, because its reward failed.
    """
    trained = bool(rollout.action_mask.any())
    of_all = {"group": rollout.group, "reward": rollout.reward, "components": rollout.components}
    branches = (
        branch._replace(action_mask=branch.action_mask & trained, **of_all)
        for branch in rollout.branches
    )
    return [*branches, rollout._replace(branches=())]


def by_group(rollouts: Iterable[Rollout]) -> dict[int, list[Rollout]]:
    """Groups rollouts by prompt, in the order in which the prompts first occur."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.group, []).append(rollout)
    return found


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
    rewards: jax.Array | None = None  # f32[B, T], of the whole completion; 0 where unknown
    values: jax.Array | None = None  # f32[B, T], of the critic before its update
    returns: jax.Array | None = None  # f32[B, T], the critic's targets
    # f32[B, T] each, of the terms that a controller steers; the same number everywhere.
    coefficients: dict[str, jax.Array] | None = None
    # i16[B, T, L, k], the experts that the sampler's layers routed the token to; -1 if unknown.
    experts: jax.Array | None = None
    # i32[B, T], where sequences share prefixes: index in the row after the last token that sees
    # this one. A shared token belongs to the first of its sequences; see `prefixes`.
    seen_until: jax.Array | None = None
    # u8[B, T, 32], the tokens that truncated sampling kept, see `core.kept`. Log-probs of tokens
    # that the policy chose are normalised over them.
    kept: jax.Array | None = None
    # Static. None: up to `runs.most_sequences` and padding in a row, each as long as it.
    runs: Runs | None = struct.field(pytree_node=False, default=None)


def segment_sum(values: jax.Array, segments: jax.Array) -> jax.Array:
    """Sums over each token's own sequence, at each token: [B, T] -> [B, T]; 0 at padding."""
    totals = segment_totals(jnp.where(segments > 0, values, 0), segments)
    return jnp.where(segments > 0, jnp.take_along_axis(totals, segments, axis=1), 0)


def earlier_actions(batch: TokenBatch) -> jax.Array:
    """Counts the policy's tokens before each token, within its sequence: i32[B, T]."""
    chosen = batch.action_mask.astype(jnp.int32)
    before = jnp.cumsum(chosen, axis=1) - chosen
    begins = jnp.diff(batch.segments, axis=1, prepend=-1) != 0
    return before - jax.lax.cummax(jnp.where(begins, before, 0), axis=1)


def observed(batch: TokenBatch) -> jax.Array:
    """Marks the tokens that the environment wrote, such as a tool's output: bool[B, T]. They are
    the tokens after the policy's first one that the policy did not choose."""
    return (batch.segments > 0) & ~batch.action_mask & (earlier_actions(batch) > 0)


def action_tokens(batch: TokenBatch) -> jax.Array:
    """Counts the tokens that the policy chose in the whole batch, f32[]."""
    return jnp.sum(batch.action_mask, dtype=jnp.float32)


def sequence_weights(batch: TokenBatch) -> jax.Array:
    """Computes 1 / (action tokens of the sequence) at each action token, 0 elsewhere: f32[B, T].
    They sum to the number of sequences that have an action token."""
    mask = batch.action_mask.astype(jnp.float32)
    lengths = segment_sum(mask, batch.segments)
    return mask / jnp.maximum(lengths, 1.0)


def action_sequences(batch: TokenBatch) -> jax.Array:
    """Counts the sequences with at least one action token in the whole batch, f32[]."""
    counts = segment_totals(batch.action_mask.astype(jnp.float32), batch.segments)
    return jnp.sum(counts > 0, dtype=jnp.float32)


def segment_totals(values: jax.Array, segments: jax.Array) -> jax.Array:
    """Sums over each sequence: [B, T] -> [B, T + 1]; entry s of a row is the sum of segment s."""
    empty = jnp.zeros((segments.shape[0], segments.shape[1] + 1), values.dtype)
    return jax.vmap(lambda zeros, s, v: zeros.at[s].add(v))(empty, segments, values)


def to_json(rollout: Rollout) -> dict[str, Any]:
    """Encodes a rollout as JSON for a checkpoint, bit for bit."""
    encoded = {
        name: [value.dtype.name, base64.b64encode(value.tobytes()).decode(), *value.shape[1:]]
        if isinstance(value, np.ndarray)
        else value
        for name, value in rollout._asdict().items()
    }
    return encoded | {"branches": [to_json(branch) for branch in rollout.branches]}


def from_json(content: Mapping[str, Any]) -> Rollout:
    """Inverts `to_json`."""
    fields = dict(content)
    arrays = ("prompt", "completion", "logprobs", "action_mask", "version")
    for name in (*arrays, "experts", "teacher", "kept"):
        if fields.get(name) is not None:
            dtype, data, *rest = fields[name]
            fields[name] = np.frombuffer(base64.b64decode(data), dtype).reshape(-1, *rest)
    fields["components"] = tuple(fields["components"])
    fields["branches"] = tuple(map(from_json, fields["branches"]))
    if fields.get("episode") is not None:
        turns, end, numbers = fields["episode"]
        fields["episode"] = Episode(tuple(map(tuple, turns)), end, numbers)
    return Rollout(**fields)


@struct.dataclass(kw_only=True)
class Minibatch:
    """The input of one optimizer step; see `packing.pack_minibatch`.

    The rows of `batch` are divided into microbatches, interleaved. Only the first `microbatches`
    are computed, so one compiled step serves every number of rows. A score that no loss needs is
    None.
    """

    batch: TokenBatch  # [N, T]
    # i32[], those in use; None in a single microbatch, where a loss sees only its own rows.
    microbatches: jax.Array | None
    # Those computed at once; divides N. Static: another number is another program.
    rows_per_microbatch: int = struct.field(pytree_node=False)
    anchor: jax.Array | None = None  # f32[N, T]
    reference: jax.Array | None = None  # f32[N, T]
    # f32[N, T] for each of the weights that a step computes over the whole batch.
    whole: dict[str, jax.Array] | None = None
