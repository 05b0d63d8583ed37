"""Rotary position embedding (arXiv:2104.09864) and its scalings."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (arXiv:2306.15595): every frequency is divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Frequency-dependent scaling of Llama 3.1 and later.

    Wavelengths longer than `original_max_positions / low_freq_factor` are stretched by `factor`.
    Wavelengths shorter than `original_max_positions / high_freq_factor` are kept, and those in
    between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): fast pairs are kept, slow ones stretched by `factor`.

    Attributes:
      factor: stretch of the longest wavelengths.
      original_max_positions: context of the pretraining, in tokens.
      beta_fast: pairs that turn more often than this in the original context are kept; None is 32.
      beta_slow: pairs that turn less often are stretched fully; None is 1.
      attention_factor: factor of cosines and sines; None derives it from the other numbers.
      mscale, mscale_all_dim: if both are given, the attention factor is the ratio of two
        temperatures (DeepSeek).
      truncate: false keeps fractions in the bounds between kept and stretched pairs; None is true.
      query_beta: growth of queries with the log of their position (Llama 4); None for none.
    """

    factor: float
    original_max_positions: int
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    query_beta: float | None = None

    def temperature(self, weight: float) -> float:
        """Returns the growth of scores with the log of the factor; 1 for a weight of 0."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """The frequencies of a rotary embedding, which rotates the first `share` of a head's
    dimensions."""

    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    share: float = 1.0


class RopeTable(NamedTuple):
    """Cosines and sines at the tokens' positions."""

    cos: jax.Array  # [B, T, 1, rotated dimensions / 2]
    sin: jax.Array
    queries: "RopeTable | None" = None  # for queries, if they grow with their position


def rope_frequencies(rope: Rope, *, head_dim: int) -> np.ndarray:
    """Computes the angle per position of each pair of dimensions, f32[head_dim / 2]."""
    # In f32, as the checkpoints were trained: its rounding is visible at position 30,000.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.float32(rope.theta) ** exponents
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / np.float32(scaling.factor)
    if isinstance(scaling, YarnScaling):
        kept = _kept_by_yarn(scaling, theta=rope.theta, head_dim=head_dim)
    else:
        # Turns of a pair over the original context: pairs with few are stretched, with many kept.
        turns = scaling.original_max_positions * frequencies / np.float32(2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - kept) * frequencies / scaling.factor + kept * frequencies).astype(np.float32)


def _kept_by_yarn(scaling: YarnScaling, *, theta: float, head_dim: int) -> np.ndarray:
    """Computes the share of each pair's frequency that is kept, f32[head_dim / 2]."""

    def pair(turns: float) -> float:
        """Returns the index of the pair that turns this often over the original context."""
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast or 32), pair(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001
    stretched = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(span)
    return 1 - np.clip(stretched, 0, 1)


def attention_factor(rope: Rope) -> float:
    """Returns the factor of cosines and sines: 1 but for YaRN."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.temperature(scaling.mscale) / scaling.temperature(scaling.mscale_all_dim)
    return scaling.temperature(1.0)


def rope_table(
    positions: jax.Array, *, rope: Rope | None, head_dim: int, precision: Precision
) -> RopeTable:
    """Computes cosines and sines for i32[B, T] positions; None rotates nothing."""
    places = positions[:, :, None, None]
    if rope is None:
        ones = jnp.ones((*positions.shape, 1, head_dim // 2), precision.accumulate)
        return RopeTable(ones, jnp.zeros_like(ones))
    rotated = int(head_dim * rope.share)
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim=rotated), precision.accumulate)
    factor = attention_factor(rope)
    angles = places * frequencies.reshape(1, 1, 1, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.query_beta is None:
        return RopeTable(cos, sin)
    contexts = (places // scaling.original_max_positions).astype(precision.accumulate)
    # The maximum keeps XLA from fusing product and sum, which it does in some programs.
    growth = 1 + jnp.maximum(scaling.query_beta * jnp.log1p(contexts), 0)
    return RopeTable(cos, sin, RopeTable(cos * growth, sin * growth))


def apply_rope(x: jax.Array, table: RopeTable, *, precision: Precision) -> jax.Array:
    """Rotates the first R dimensions of heads [B, T, N, head_dim], as many as the table has;
    dimension i is paired with i + R / 2."""
    cos, sin = table.cos, table.sin
    size = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :size].astype(precision.accumulate), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(precision.activations)
    rest = x[..., size:].astype(precision.activations)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
