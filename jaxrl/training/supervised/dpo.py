"""Direct preference optimization: a policy from pairs of completions, without a reward model.

The reference is the initial model, with its initial adapters if any; its log-probs are computed
once for each batch.
"""

import dataclasses

import jax

from jaxrl.builders.model import find_trained
from jaxrl.builders.same_files import check_same_functions
from jaxrl.builders.supervised import set_up
from jaxrl.config.preference import DPOConfig, PairLossConfig
from jaxrl.core import Hosts, Metrics, Minibatch, check_parameters, jit, load_function, naming_keys
from jaxrl.learner import make_learner
from jaxrl.losses import Scores, loss_arguments, objective, preference
from jaxrl.losses.preference import PairLoss
from jaxrl.models import Params, lora
from jaxrl.training.mirror import mirrored
from jaxrl.training.supervised.fit import FitResult, check_resumable
from jaxrl.training.supervised.pairs import fit_pairs, load_pairs


@mirrored
def train_dpo(config: DPOConfig, *, fork: str | None = None) -> FitResult:
    """Trains a policy on pairs; raises as `fit`, and ValueError for a bad loss, data or model."""
    start = check_resumable(config, fork=fork)
    check_same_functions({"loss.name": config.loss.name}, Hosts())
    goal = objective(preference.pairwise(load_loss(config.loss)), preference.pair_mean)
    checkpoint = find_trained(config)
    data = load_pairs(config.data, checkpoint.tokenizer, max_tokens=config.train.row_length)
    setup = set_up(config, checkpoint)
    reference: Params = jit(lora.as_reference, static_argnums=1)(setup.params, config.precision)
    learner = make_learner(
        setup.model,
        goal,
        optimizer=setup.optimizer.transformation,
        precision=config.precision,
        param_shardings=setup.param_shardings,
    )
    score = jit(learner.score)

    def prepare(params: Params, minibatch: Minibatch) -> Minibatch:
        scored = score(lora.with_trainable(params, reference), minibatch)
        return dataclasses.replace(minibatch, reference=scored)

    @jit
    def compare(logprobs: jax.Array, minibatch: Minibatch) -> Metrics:
        scores = Scores(logprobs=logprobs, reference=minibatch.reference)
        scores, _ = goal.survey(scores, minibatch.batch)
        return goal.total(scores, minibatch.batch)[1]

    return fit_pairs(
        config,
        data,
        setup=setup,
        measure=lambda params, batch: compare(score(params, batch), prepare(params, batch)),
        title="dpo",
        fork=start,
        learner=learner,
        prepare=prepare,
    )


def load_loss(config: PairLossConfig) -> PairLoss:
    """Builds the loss that `loss.name` and its parameters describe.

    Raises:
      ValueError: for a name that cannot be loaded, or a wrong parameter; the message names the key.
    """
    make = load_function(config.name, builtin=preference, key="loss.name")
    check_parameters(make, config.parameters, key="loss")
    loss = naming_keys(
        lambda given: make(**loss_arguments(make, given)),
        config.parameters,
        key="loss",
        name=config.name,
    )
    if not isinstance(loss, PairLoss):
        raise ValueError(
            f"loss.name = {config.name!r}: it returns {type(loss).__name__}, expected a PairLoss"
        )
    return loss
