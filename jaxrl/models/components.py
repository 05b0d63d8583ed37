"""Components of a decoder: experts, narrow projections, linear attention, groups of layers."""

import dataclasses
from typing import Literal, NamedTuple

from jaxrl.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """The gated unit of gpt-oss (arXiv:2508.10925): (up + 1) * gate * sigmoid(alpha * gate).

    Attributes:
      alpha: sharpness of the sigmoid.
      limit: largest value of the gate, and largest magnitude of up.
    """

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of feed-forward networks.

    Attributes:
      count: experts per layer.
      per_token: experts per token.
      intermediate_size: hidden units of one expert.
      renormalise: true if a token's weights are divided by their sum.
      biases: true if the router and the experts' projections have biases.
      fused: true if one matrix per expert holds gate and up, in alternate rows.
      clamp: None for the plain gated unit.
      scores: function of the router's logits.
      corrected: true if experts are chosen by scores plus a bias for each expert, which no gradient
        trains (arXiv:2408.15664).
      groups, chosen_groups: a token's experts come from the best `chosen_groups` of `groups`.
      scale: factor of the weights.
      shared: experts that every token uses in addition, computed as one larger expert.
      gated_shared: hidden units of a shared expert whose output a gate multiplies; 0 for none.
      dense_layers: first layers of the decoder, which have a feed-forward network instead.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool
    biases: bool = False
    fused: bool = False
    clamp: ClampedGate | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared: int = 0
    gated_shared: int = 0
    dense_layers: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention, see `latent`.

    Attributes:
      q_rank: size of the narrow projection of queries; None for a direct projection.
      kv_rank: size of the narrow projection of keys and values.
      rope_dim: rotated dimensions of a head.
      value_dim: dimensions of a head's values.
      interleaved: true if rope pairs neighbouring dimensions.
    """

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Layers with the gated delta rule, see `linear_attention`.

    Attributes:
      key_heads: heads of queries and keys.
      value_heads: heads of values, a multiple of `key_heads`.
      key_dim: dimensions of a head's queries and keys.
      value_dim: dimensions of a head's values.
      width: tokens that the convolution sees.
      period: for each layer, true for the delta rule and false for attention; repeated.
      split: true if the convolution's inputs, the gate of the result and the rule's two gates have
        separate projections; false if two projections hold them, one key head after the other.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    period: tuple[bool, ...]
    split: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Kind(NamedTuple):
    """Settings that differ by layer, besides its parameters."""

    window: int | None  # see `families.DecoderConfig.windows`
    rope: Rope | None

    @property
    def name(self) -> str:
        """Hugging Face's word for such layers."""
        if self.rope is None:
            return "no_rope"
        return "full" if self.window is None else "sliding"


class Group(NamedTuple):
    """Layers of one kind with the same parameters, stacked and scanned together.

    Attributes:
      name: key of their parameters.
      first: index of the first layer.
      count: number of layers.
      step: distance of their indices.
      kind: their window and rope.
      routed: true if they have experts.
      linear: true if they have the gated delta rule in place of attention.
    """

    name: str
    first: int
    count: int
    step: int
    kind: Kind
    routed: bool
    linear: bool

    @property
    def layers(self) -> range:
        """Indices of the layers."""
        return range(self.first, self.first + self.count * self.step, self.step)
