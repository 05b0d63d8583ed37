"""Likelihoods of some of the tokens, each averaged over these tokens alone.

They are objectives: `grpo() + 0.1 * positive_likelihood()`. A coefficient means the same for every
number of such tokens in the batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, observed
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses.algebra import TokenLoss, token_loss
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.objectives import Aggregation, Objective, objective
from jaxrl.losses.scores import Need, Scores, require


@with_formula
def positive_likelihood(threshold: float = 0.0) -> Objective:
    """-log pi, averaged over the tokens of completions whose reward exceeds `threshold`: imitation
    of successes (VAPO, arXiv:2504.05118). "nll/positive" reports it.

    The paper's sum runs over the right completions of a batch, and so does this one; NeMo-RL
    divides by the right tokens of each microbatch.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> goal = positive_likelihood()
      >>> for rewards in ([1, 1, 0, 0], [0, 0, 0, 0]):
      ...     scores, batch = one_sequence(
      ...         advantages=[1] * 4, logprobs=[-1, -0.5, -3, -3], rewards=rewards
      ...     )
      ...     print(*(float(x) for x in (goal.total(scores, batch)[0], goal.denominator(batch))))
      1.5 2.0
      0.0 0.0

    Raises:
      ValueError: when it is applied, if the batch holds no rewards.
    """

    def right(batch: TokenBatch) -> jax.Array:
        if batch.rewards is None:
            raise ValueError(
                "positive_likelihood: batch.rewards is None; make the batch with pack()"
            )
        return batch.action_mask & (batch.rewards > threshold)

    return _mean_nll(lambda scores: scores.logprobs, right, name="nll/positive")


@with_formula
def completion_likelihood() -> Objective:
    """-log pi, averaged over all tokens that the policy chose: cross-entropy beside the policy's
    loss, on the same tokens. Tokens that `among` takes out of the policy's loss count here (the sum
    of components in prime-rl, each with its own count; no paper). "nll/completion" reports it.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[0, 0], logprobs=[-1, -3])
      >>> goal = completion_likelihood()
      >>> float(goal.total(scores, batch)[0]), float(goal.denominator(batch))
      (4.0, 2.0)
    """
    return _mean_nll(
        lambda scores: scores.logprobs, lambda batch: batch.action_mask, name="nll/completion"
    )


@with_formula
def observation_likelihood() -> Objective:
    """-log pi, averaged over the tokens that the environment wrote: the policy learns to predict
    what its actions lead to, from failed episodes too (ECHO, arXiv:2605.24517). "nll/observed"
    reports it.

    A chat template's marks around a tool's output are among these tokens. The paper leaves out the
    terminal's warnings, which a batch does not mark.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(
      ...     advantages=[1] * 4,
      ...     logprobs=-1,
      ...     observed=[0, 0, -2, 0],
      ...     action_mask=[False, True, False, True],  # prompt, action, output of a tool, action
      ... )
      >>> goal = observation_likelihood()
      >>> float(goal.total(scores, batch)[0]), float(goal.denominator(batch))
      (2.0, 1.0)
    """
    need = Need.OBSERVED
    return _mean_nll(lambda scores: require(scores, need), observed, need, name="nll/observed")


def _mean_nll(
    logprobs: Callable[[Scores], jax.Array],
    marks: Callable[[TokenBatch], jax.Array],
    *needs: Need,
    name: str,
) -> Objective:
    """Averages -logprobs over the tokens that are marked, bool[B, T]."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = -logprobs(scores)
        return value, {name: masked_mean(value, marks(batch))}

    aggregation = Aggregation(
        lambda batch: marks(batch).astype(jnp.float32),
        lambda batch: jnp.sum(marks(batch), dtype=jnp.float32),
    )
    return objective(token_loss(apply, *needs), aggregation)


@with_formula
def cross_entropy() -> TokenLoss:
    """-log p of each completion token, nats.

    Example:
      >>> from jaxrl.losses import objective, one_sequence, token_mean
      >>> scores, batch = one_sequence(advantages=[0, 0], logprobs=[-1, -3])
      >>> goal = objective(cross_entropy(), token_mean)
      >>> float(goal.total(scores, batch)[0]), float(goal.denominator(batch))
      (4.0, 2.0)
    """
    return token_loss(lambda scores, batch: (-scores.logprobs, {}))


@with_formula
def dft() -> TokenLoss:
    """-p log p of each completion token, nats, without a gradient through the factor p: dynamic
    fine-tuning (DFT, arXiv:2508.05629). Cross-entropy is a policy gradient that weights a token by
    1 / p, and the factor takes this weight back.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[0], logprobs=-2)
      >>> f"{dft().apply(scores, batch)[0].item():.3f}"  # 2 e^-2
      '0.271'
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        p = jax.lax.stop_gradient(jnp.exp(scores.logprobs))
        return -p * scores.logprobs, {}

    return token_loss(apply)
