"""Per-token log-probs and entropy from hidden states, without the [B, T, V] array of logits.

The output layer is the largest product of a small model, and the logits are the largest array of
any model. Here logits exist only for one chunk of positions and one chunk of the vocabulary. The
forward pass keeps running sums (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867). The
backward pass recomputes the logits. Both skip positions outside the mask, such as prompts and
padding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jaxrl.core.gpu_kernels import on_nvidia
from jaxrl.core.kept import Kept, among
from jaxrl.core.precision import DType, Precision
from jaxrl.models import head_kernel
from jaxrl.models.attention.scores import soft_cap_slope
from jaxrl.models.head_chunks import DEFAULT_CHUNK, Chunk, chunk_sizes, vocab_chunks
from jaxrl.models.output_layer import Head, beside, rounded_logits, tempered
from jaxrl.models.products import product, rounded_sum, summed_in, transposed_product
from jaxrl.models.row_parts import Rows
from jaxrl.models.slots import Allowed, SlotChunk, chunk_of, make_slots, predicted, put, take

_GROUPED = ("batch", "chunk", "vocab", "embed")  # of the head's gradient, if rows have parts


def token_logprobs(
    hidden: jax.Array,
    head: Head,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    precision: Precision | str,
    chunk: Chunk = DEFAULT_CHUNK,
    kept: Kept | None = None,
) -> jax.Array:
    """Computes the log-probability of each token given the tokens before it.

    Args:
      hidden: activations[B, T, D] after the final norm; position t - 1 scores token t. With an
        adapter of the head [B, T, D + rank], see `Head`.
      head: weights compute[V, D], cap and temperature of the logits.
      tokens: i32[B, T].
      mask: bool[B, T], the tokens to score. The row with the most of them sets the cost.
      precision: products have operands in `compute`; logits and result are rounded to `logits`.
        Sums over the vocabulary are in f32 or wider.
      chunk: affects memory and speed; the result changes by rounding only.
      kept: the tokens that truncated sampling kept; those drawn among them are scored by the
        distribution over them alone. None is the whole vocabulary.

    Returns:
      f32[B, T] (f64 if `precision.logits` is): entry t is log p(tokens[:, t] | tokens[:, :t]).
      Entries outside the mask are 0 and have no gradient, whatever `hidden` holds there. The same
      is true of entry 0, which no token predicts.

    Raises:
      ValueError: if the temperature or a chunk size is not positive.
    """
    plan = _plan(tokens.shape, head, precision=precision, chunk=chunk)
    return _token_scores(hidden, head, tokens, mask, plan, kept)[0]


def token_logprobs_and_entropy(
    hidden: jax.Array,
    head: Head,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    precision: Precision | str,
    chunk: Chunk = DEFAULT_CHUNK,
    kept: Kept | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `token_logprobs` and the entropy of the same distributions.

    Takes the arguments of `token_logprobs` and raises its errors. The entropy, in nats, has the
    shape, dtype and mask of the log-probs and is differentiable, too.
    """
    plan = _plan(tokens.shape, head, precision=precision, chunk=chunk, entropy=True)
    return _token_scores(hidden, head, tokens, mask, plan, kept)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static settings of one call."""

    precision: Precision
    positions: int  # per row and chunk
    vocab_size: int
    vocab_chunks: int
    cap: float | None
    rows: Rows
    tempered: bool
    entropy: bool

    @property
    def stats(self) -> DType:
        """Dtype of sums over the vocabulary: in half precision the error of thousands of additions
        would dominate the result."""
        return jnp.promote_types(self.precision.logits, jnp.float32)

    @property
    def lowest(self) -> float:
        """A logit of probability 0 that stays finite when gradients multiply it."""
        return -(float(jnp.finfo(self.stats).max) ** 0.5)

    @property
    def behind(self) -> int:
        """Number of positions from a hidden state to the token that it scores."""
        return int(self.rows.per_row == 1)

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of `chunk_of`."""
        compute = self.precision.compute
        return {"size": self.positions, "behind": self.behind, "dtype": compute}

    @property
    def chunk_size(self) -> int:
        return -(-self.vocab_size // self.vocab_chunks)

    def kernel(self, function: Callable[..., Any], chunk: SlotChunk, weights: jax.Array) -> Any:
        """Returns `on_nvidia` of a function of `head_kernel`, if that is for this chunk."""
        here = self.rows.platform == "gpu" and self.rows.apart and self.vocab_chunks == 1
        whole = here and self.cap is None and chunk.allowed is None
        if not (whole and head_kernel.supports(chunk.hidden, weights[0], self.precision)):
            return {}
        own = functools.partial(function, settings=head_kernel.Settings(self.precision))
        return on_nvidia(self.rows.by_device(own, divided=head_kernel.BY_ROWS[function]))


def _plan(
    shape: tuple[int, ...],
    head: Head,
    *,
    precision: Precision | str,
    chunk: Chunk,
    entropy: bool = False,
) -> _Plan:
    precision, vocab_size = Precision.of(precision), len(head.weights)
    positions, most = chunk_sizes(*shape, vocab_size=vocab_size, division=head.rows, chunk=chunk)
    if positions < 1 or most < 1:
        raise ValueError(f"chunk={chunk} must have positive sizes")
    chunks = vocab_chunks(vocab_size, most)
    if precision.sums == "fixed":  # as the sampler: one sum over the whole vocabulary
        positions, chunks = max(1, positions // chunks), 1
    # Nothing is fused with products of cuBLAS: a factor of 1 would be a pass over all logits.
    plain = not isinstance(head.temperature, jax.Array) and head.temperature == 1
    return _Plan(
        precision=precision,
        positions=positions,
        vocab_size=vocab_size,
        vocab_chunks=chunks,
        cap=head.cap,
        rows=head.rows,
        tempered=not (plain and head.rows.platform == "gpu"),
        entropy=entropy,
    )


def _token_scores(
    hidden: jax.Array,
    head: Head,
    tokens: jax.Array,
    mask: jax.Array,
    plan: _Plan,
    kept: Kept | None,
) -> tuple[jax.Array, jax.Array]:
    chex.assert_rank([hidden, head.weights], [3, 2])
    chex.assert_equal_shape([tokens, mask])
    chex.assert_equal_shape_prefix([hidden, tokens], 2)
    if not isinstance(head.temperature, jax.core.Tracer) and not head.temperature > 0:
        raise ValueError(f"temperature={head.temperature} must be positive")
    temperature = lax.stop_gradient(jnp.asarray(head.temperature, plan.stats))
    scored, rows, adapter = predicted(mask), head.rows, head.adapter
    if adapter is not None and rows.platform == "gpu":  # the kernels read whole blocks
        more = -hidden.shape[2] % head_kernel.TERMS
        hidden = jnp.pad(hidden, ((0, 0), (0, 0), (0, more)))
        adapter = jnp.pad(adapter, ((0, 0), (0, more)))
    if rows.per_row > 1:
        tokens, scored, kept = jax.tree.map(rows.divide, (tokens, scored, kept))
        hidden = rows.before(hidden)
    slots = make_slots(
        tokens, scored, positions=plan.positions, kept=kept, vocab_size=plan.vocab_size
    )
    found = _scores(plan, hidden, head.weights, adapter, slots, temperature)
    return jax.tree.map(rows.join, found) if rows.per_row > 1 else found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(plan, hidden, unembedding, adapter, slots, temperature):
    return _scores_forward(plan, hidden, unembedding, adapter, slots, temperature)[0]


def _scores_forward(plan, hidden, unembedding, adapter, slots, temperature):
    """Returns (log-probs, entropy) and the residuals of the backward pass."""
    weights = _interleave(plan, beside(unembedding, adapter))
    sizes = plan.sizes

    def per_chunk(i, filled):
        chunk = h, target, allowed = chunk_of(hidden, slots, i, **sizes)
        kernel = plan.kernel(head_kernel.reduced, chunk, weights)

        def per_vocab_chunk(j, stats):
            top, total, moment, chosen = stats
            z = _logits(plan, h, weights, j, temperature, allowed)
            new_top, here = lax.platform_dependent(
                z, top, cuda=_add_in_one_pass, rocm=_add_in_one_pass, default=_add
            )
            shift = top - new_top
            if plan.entropy:
                # One loop for both sums would round the first, hence the log-probs, in another way.
                apart = lax.optimization_barrier(z - new_top[:, None])
                weighted = jnp.sum(jnp.exp(apart) * apart, axis=1)
                moment = jnp.exp(shift) * (moment + shift * total) + weighted
            total = jnp.exp(shift) * total + here
            here = jnp.take_along_axis(z, (target // plan.vocab_chunks)[:, None], axis=1)[:, 0]
            chosen = jnp.where(target % plan.vocab_chunks == j, here, chosen)
            return new_top, total, moment, chosen

        def by_products(*_):
            zeros = jnp.zeros(h.shape[0], plan.stats)
            start = (zeros + plan.lowest, zeros, zeros, zeros)
            return lax.fori_loop(0, plan.vocab_chunks, per_vocab_chunk, start)

        given = (h, weights[0], target, temperature)
        found = lax.platform_dependent(*given, **kernel, default=by_products)
        top, total, moment, chosen = found
        log_total = jnp.log(total)
        # In this order rounding cannot push a log-prob above 0.
        values = (chosen - top - log_total, top + log_total, log_total - moment / total)
        return tuple(put(x, value, i) for x, value in zip(filled, values, strict=True))

    empty = jnp.zeros(slots.entry.shape, plan.stats)
    logprobs, normaliser, entropy = lax.fori_loop(0, slots.trips, per_chunk, (empty,) * 3)

    def spread(values):
        values = values.astype(plan.precision.logits).astype(plan.stats)
        return jnp.where(slots.scored, jnp.take_along_axis(values, slots.slot, axis=1), 0)

    residuals = (hidden, unembedding, adapter, slots, temperature, normaliser, entropy)
    return (spread(logprobs), spread(entropy)), residuals


def _add(z: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest of `top`[N] and the logits z[N, C], and the sum of exp(z - largest)."""
    new_top = jnp.maximum(top, jnp.max(z, axis=1))
    return new_top, jnp.sum(jnp.exp(z - new_top[:, None]), axis=1)


def _add_in_one_pass(z: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Equals `_add` to rounding, by one reduction: XLA for GPUs reads the logits once for each."""

    def join(x, y):
        highest = jnp.maximum(x[0], y[0])
        return highest, jnp.exp(x[0] - highest) * x[1] + jnp.exp(y[0] - highest) * y[1]

    least = jnp.asarray(jnp.finfo(z.dtype).min, z.dtype)
    found = lax.reduce((z, jnp.ones_like(z)), (least, jnp.zeros_like(least)), join, (1,))
    return join((top, jnp.zeros_like(top)), found)


def _scores_backward(plan, residuals, cotangents):
    hidden, unembedding, adapter, slots, temperature, normaliser, entropy = residuals
    weights = _interleave(plan, beside(unembedding, adapter))
    frozen = 0 if adapter is None else unembedding.shape[1]
    columns = jnp.arange(plan.chunk_size) * plan.vocab_chunks
    parts, constrain, sizes = plan.rows.parts, plan.rows.constrain, plan.sizes
    used = jnp.arange(slots.entry.shape[1])[None, :] < slots.count[:, None]
    by_logprob, by_entropy = (
        jnp.where(used, jnp.take_along_axis(g, slots.entry, axis=1), 0) / temperature
        for g in cotangents
    )

    def per_chunk(i, gradients):
        d_hidden, d_weights = gradients
        chunk = h, target, allowed = chunk_of(hidden, slots, i, **sizes)
        kernel = plan.kernel(head_kernel.gradient, chunk, weights)
        slopes = head_kernel.Slopes(
            *(
                take(x, i, size=plan.positions).reshape(-1)
                for x in (normaliser, entropy, by_logprob, by_entropy)
            )
        )

        def by_products(j):
            log_total, ent, g_logprob, g_entropy = (x[:, None] for x in slopes)
            z = _logits(plan, h, weights, j, temperature, allowed)
            logp = z - log_total
            per_p = g_logprob + g_entropy * (logp + ent) if plan.entropy else g_logprob
            chosen = target[:, None] == (columns + j)[None, :]
            d_z = jnp.where(chosen, g_logprob, 0) - jnp.exp(logp) * per_p
            if plan.cap is not None:
                d_z = d_z * soft_cap_slope(z * temperature, plan.cap)
            return d_z.astype(plan.precision.compute)

        def per_vocab_chunk(j, gradients):
            d_h, d_weights = gradients
            inputs = h[:, frozen:]
            given = (h, weights[0], target, temperature, slopes)
            d_z = lax.platform_dependent(*given, **kernel, default=lambda *_: by_products(j))
            d_h = d_h + product(d_z, weights[j], contract=(1, 0), precision=plan.precision)
            if parts == 1:
                d_w = transposed_product(d_z, inputs, precision=plan.precision)
                return d_h, d_weights.at[j].add(d_w)
            groups = (x.reshape(parts, -1, x.shape[1]) for x in (d_z, inputs))
            d_w = transposed_product(*groups, batch=(0,), precision=plan.precision)
            return d_h, constrain(d_weights.at[:, j].add(d_w), _GROUPED)

        start = (jnp.zeros(h.shape, plan.precision.accumulate), d_weights)
        d_h, d_weights = lax.fori_loop(0, plan.vocab_chunks, per_vocab_chunk, start)
        return put(d_hidden, d_h, i), d_weights

    empty = jnp.zeros_like(weights[:, :, frozen:], plan.precision.accumulate)
    if parts > 1:
        empty = constrain(jnp.broadcast_to(empty, (parts, *empty.shape)), _GROUPED)
    start = jnp.zeros((*slots.entry.shape, hidden.shape[2]), hidden.dtype), empty
    d_hidden, d_weights = lax.fori_loop(0, slots.trips, per_chunk, start)
    if parts > 1:
        d_weights = d_weights.astype(summed_in(plan.precision))
        d_weights = lax.reduce(d_weights, jnp.zeros((), d_weights.dtype), lax.add, (0,))
    # The gradient of entry t belongs to an earlier position.
    scored, slot = slots.scored, slots.slot
    if plan.behind:
        scored, slot = (jnp.roll(x, -plan.behind, axis=1) for x in (scored, slot))
    scored, slot = scored[:, :, None], slot[:, :, None]
    d_hidden = jnp.where(scored, jnp.take_along_axis(d_hidden, slot, axis=1), 0)
    d_weights = _restore(plan, d_weights)
    round_to = rounded_sum if parts > 1 else jnp.astype
    d_weights = round_to(d_weights, unembedding.dtype)
    both = (d_weights, None) if adapter is None else (jnp.zeros_like(unembedding), d_weights)
    return d_hidden, *both, None, jnp.zeros_like(temperature)


_scores.defvjp(_scores_forward, _scores_backward)


def _interleave(plan: _Plan, unembedding: jax.Array) -> jax.Array:
    """Divides [V, D] into [vocab_chunks, chunk_size, D]. Column c of chunk j is entry
    c * vocab_chunks + j: every chunk has entries from the whole vocabulary, so that all devices
    work on each chunk when the vocabulary is sharded."""
    padding = plan.chunk_size * plan.vocab_chunks - plan.vocab_size
    padded = jnp.pad(unembedding, ((0, padding), (0, 0))) if padding else unembedding
    return padded.reshape(plan.chunk_size, plan.vocab_chunks, -1).swapaxes(0, 1)


def _restore(plan: _Plan, chunks: jax.Array) -> jax.Array:
    """Inverts `_interleave`."""
    return chunks.swapaxes(0, 1).reshape(-1, chunks.shape[2])[: plan.vocab_size]


def _logits(plan: _Plan, h, weights, j, temperature, allowed: Allowed | None) -> jax.Array:
    """Computes tempered logits of chunk j of the vocabulary, stats[N, chunk_size]; `plan.lowest`
    where a token is not allowed."""
    z = product(h, weights[j], contract=(1, 1), precision=plan.precision)
    z = rounded_logits(z, Head(weights, plan.cap), precision=plan.precision)
    z = z.astype(plan.stats)
    z = tempered(z, temperature) if plan.tempered else z
    columns = jnp.arange(plan.chunk_size) * plan.vocab_chunks + j
    if allowed is not None:
        z = jnp.where(among(allowed.ids, columns) | allowed.whole[:, None], z, plan.lowest)
    if plan.chunk_size * plan.vocab_chunks == plan.vocab_size:
        return z
    return jnp.where((columns < plan.vocab_size)[None, :], z, plan.lowest)
