"""Losses of the difference between the two completions: DPO and its variants."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.losses import bounds
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.preference.pairs import PairLoss, ScoredCompletion, ScoredPair


@with_formula
def sigmoid(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PairLoss:
    """DPO (arXiv:2305.18290): -log sigmoid(beta (chosen - rejected)).

    With `label_smoothing`, conservative DPO (https://ericmitchell.ai/cdpo.pdf): the share of labels
    that are assumed to be swapped.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{sigmoid(beta=0.5).apply(pair):.3f}"
      '0.313'

    Raises:
      ValueError: if `label_smoothing` is not in [0, 0.5).
    """
    loss = logistic(label_smoothing)
    return PairLoss(beta, lambda x: loss(beta * x.apart))


@with_formula
def hinge(*, beta: float = 0.1) -> PairLoss:
    """SLiC-HF's hinge on DPO's reward (arXiv:2305.10425, 2309.06657):
    max(0, 1 - beta (chosen - rejected)).

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> float(hinge(beta=0.25).apply(pair))
      0.5
    """
    return PairLoss(beta, lambda x: jax.nn.relu(1 - beta * x.apart))


@with_formula
def ipo(*, beta: float = 0.1) -> PairLoss:
    """IPO (arXiv:2310.12036) on log-ratios averaged over a completion's tokens, as TRL has it:
    (chosen / tokens - rejected / tokens - 1 / (2 beta))^2.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> ipo(beta=0.5).apply(pair)  # (0.25 + 0.5 - 1)^2
      0.0625
    """
    return PairLoss(beta, lambda x: (x.mean_apart - 1 / (2 * beta)) ** 2)


@with_formula
def ipo_summed(*, beta: float = 0.1) -> PairLoss:
    """IPO (arXiv:2310.12036) on log-ratios of whole completions, as OpenRLHF has it:
    (chosen - rejected - 1 / (2 beta))^2.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> ipo_summed(beta=0.5).apply(pair)
      1.0
    """
    return PairLoss(beta, lambda x: (x.apart - 1 / (2 * beta)) ** 2)


@with_formula
def sigmoid_averaged(*, beta: float = 5.0) -> PairLoss:
    """Length-normalised DPO (Tulu 3, arXiv:2411.15124), on log-ratios averaged over a completion's
    tokens: -log sigmoid(beta (chosen / tokens - rejected / tokens)). As averages are smaller than
    sums, beta is larger than in DPO.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{sigmoid_averaged(beta=4.0).apply(pair):.3f}"  # softplus(-4 (0.25 + 0.5))
      '0.049'
    """
    return PairLoss(beta, lambda x: -jax.nn.log_sigmoid(beta * x.mean_apart))


@with_formula
def rpo(*, beta: float = 0.1, nll: float = 1.0) -> PairLoss:
    """DPO and the likelihood of the chosen completion (iterative RPO, arXiv:2404.19733):
    -log sigmoid(beta (chosen - rejected)) - nll log pi(chosen) / tokens. The likelihood keeps the
    chosen completion from losing probability as well. The paper scales the first term instead, by
    1. TRL divides by the tokens of all chosen completions of a batch.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{rpo(beta=0.5, nll=0.1).apply(pair):.3f}"  # 0.313 + 0.1 x 4 / 4
      '0.413'

    Raises:
      ValueError: for a negative `nll`.
    """
    bounds.not_negative("nll", nll)
    dpo = sigmoid(beta=beta)

    def likelihood(completion: ScoredCompletion) -> jax.Array:
        return nll * completion.learner / completion.tokens

    return PairLoss(beta, lambda x: dpo.apply(x) - likelihood(x.chosen))


@with_formula
def length_desensitized(*, beta: float = 0.1, tail: float = 0.5) -> PairLoss:
    """LD-DPO (arXiv:2409.06411): DPO in which log-probs beyond the length of the shorter completion
    count `tail` times, under the learner and the reference, so that no completion wins by its
    length. With 1 it is DPO; the paper's best values are .3 to .6.

    Example:
      >>> print(length_desensitized(tail=0.25))
      length_desensitized(beta=0.1, tail=0.25)

    Raises:
      ValueError: for a tail that is not in [0, 1].
    """
    return dataclasses.replace(sigmoid(beta=beta), tail=tail)


@with_formula
def robust(*, beta: float = 0.1, label_smoothing: float = 0.1) -> PairLoss:
    """Robust DPO (arXiv:2403.00409): unbiased if a share s = `label_smoothing` of the labels is
    swapped: (-(1 - s) log sigmoid(h) + s log sigmoid(-h)) / (1 - 2 s), h = beta (chosen -
    rejected). It has no lower bound.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{robust(beta=0.5).apply(pair):.3f}"  # (0.9 x 0.313 - 0.1 x 1.313) / 0.8
      '0.188'

    Raises:
      ValueError: if `label_smoothing` is not in [0, 0.5).
    """
    _check_smoothing(label_smoothing)

    def apply(x: ScoredPair) -> jax.Array:
        h = beta * x.apart
        right, wrong = jax.nn.log_sigmoid(h), jax.nn.log_sigmoid(-h)
        return (label_smoothing * wrong - (1 - label_smoothing) * right) / (1 - 2 * label_smoothing)

    return PairLoss(beta, apply)


@with_formula
def exo(*, beta: float = 0.1, label_smoothing: float = 1e-3) -> PairLoss:
    """EXO (arXiv:2402.00856, equation 16): the reverse KL divergence, KL(q || p), of the policy's
    choice q = sigmoid(h), h = beta (chosen - rejected), from the label's p = 1 - `label_smoothing`:
    q log q / p + (1 - q) log (1 - q) / (1 - p). DPO's is the forward one.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{exo(beta=0.5, label_smoothing=0.1).apply(pair):.3f}"  # q = 0.731
      '0.114'

    Raises:
      ValueError: if `label_smoothing` is not in (0, 0.5).
    """
    _check_smoothing(label_smoothing)
    bounds.positive("label_smoothing", label_smoothing)

    def apply(x: ScoredPair) -> jax.Array:
        h = beta * x.apart
        right, wrong = jax.nn.log_sigmoid(h), jax.nn.log_sigmoid(-h)
        first = jnp.exp(right) * (right - jnp.log1p(-label_smoothing))
        return first + jnp.exp(wrong) * (wrong - jnp.log(label_smoothing))

    return PairLoss(beta, apply)


@with_formula
def discopop(*, beta: float = 0.1, tau: float = 0.05) -> PairLoss:
    """DiscoPOP (arXiv:2406.08414, equation 5), a loss that a language model found:
    -(1 - s) log sigmoid(h) + s e^-h, h = beta (chosen - rejected), s = sigmoid(h / tau).

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{discopop(beta=0.5).apply(pair):.3f}"  # s is almost 1: e^-1
      '0.368'

    Raises:
      ValueError: unless 0 < tau <= 1; with a larger one the loss grows exponentially.
    """
    bounds.positive("tau", tau)
    bounds.fraction("tau", tau)

    def apply(x: ScoredPair) -> jax.Array:
        h = beta * x.apart
        first = -jax.nn.sigmoid(-h / tau) * jax.nn.log_sigmoid(h)
        return first + jnp.exp(jax.nn.log_sigmoid(h / tau) - h)  # e^-h alone may be infinite

    return PairLoss(beta, apply)


def logistic(label_smoothing: float) -> Callable[[jax.Array], jax.Array]:
    """Returns h -> -(1 - s) log sigmoid(h) - s log sigmoid(-h), s = `label_smoothing`; raises
    ValueError if it is not in [0, 0.5)."""
    _check_smoothing(label_smoothing)

    def loss(h: jax.Array) -> jax.Array:
        right, wrong = jax.nn.log_sigmoid(h), jax.nn.log_sigmoid(-h)
        return -(1 - label_smoothing) * right - label_smoothing * wrong

    return loss


def _check_smoothing(share: float) -> None:
    if not 0 <= share < 0.5:
        raise ValueError(f"label_smoothing={share} must be >= 0 and < 0.5")
