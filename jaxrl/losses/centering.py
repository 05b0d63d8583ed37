"""Score centering: policy gradients of tokens that a mismatched sampler drew, without a ratio."""

import jax

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics
from jaxrl.losses.algebra import TokenLoss, token_loss
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.scores import Need, Scores, require


@with_formula
def score_centering() -> TokenLoss:
    """The additive term that removes the drift of a mismatched sampler (arXiv:2609.20807).

    Tokens are drawn from q, the sampler's numerics, and the gradient is of log p, the learner's.
    The mean of the score, E_q[grad log p], is then not 0, and every reward pushes the policy along
    it: the drift is E_q[A] E_q[grad log p]. The term subtracts A E_q[grad log p] at each token,
    summed over the whole vocabulary. q is the shadow's distribution: the published weights in the
    sampler's dtypes. The term costs the shadow's forward pass and its logits. Its value is 0; only
    its gradient counts.

    Add it to a loss without ratio and clip: `reinforce() + score_centering()`. In an update after
    the first, q is of the current weights, so the term removes rounding and not the movement.

    Example:
      >>> from jaxrl.losses import reinforce
      >>> reinforce() + score_centering()
      reinforce() + score_centering()
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        mean = require(scores, Need.EXPECTED)
        return batch.advantages * (mean - jax.lax.stop_gradient(mean)), {}

    return token_loss(apply, Need.EXPECTED)
