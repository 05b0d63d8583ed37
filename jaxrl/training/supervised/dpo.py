"""Direct preference optimization: a policy from pairs of completions, without a reward model.

The learner is that of reinforcement learning. The reference is the initial model; its log-probs
are computed once for each batch.
"""

import dataclasses

import jax

from jaxrl.builders.layout import make_layout
from jaxrl.builders.minibatches import supervised_shape
from jaxrl.builders.model import load_model
from jaxrl.builders.optimizer import make_optimizer
from jaxrl.config.preference import DPOConfig, PairLossConfig
from jaxrl.core import plugins, precision
from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import Metrics
from jaxrl.learner.policy import make_learner
from jaxrl.losses import from_config, preference
from jaxrl.losses.algebra import objective
from jaxrl.losses.preference import PairLoss
from jaxrl.losses.scores import Scores
from jaxrl.models import huggingface
from jaxrl.models.spec import Params
from jaxrl.training.supervised.fit import Result, Task, fit, too_long_note
from jaxrl.training.supervised.pairs import (
    load_held_out_pairs,
    load_training_pairs,
    measure_pairs,
    pair_batches,
)


def train_dpo(config: DPOConfig) -> Result:
    """Trains for `config.train.steps` steps, or until a signal, and saves the model.

    Raises:
      ResumeError, CheckpointError: as `supervised.fit`.
      ValueError: for a loss, data, a model or a run directory that cannot be used; the message
        names it.
    """
    policy = config.policy
    goal = objective(preference.pairwise(load_loss(config.loss)), preference.pair_mean)
    layout = make_layout(config.mesh)
    tokenizer = huggingface.load_tokenizer(config.model.path)
    longest = config.train.row_length
    training = load_training_pairs(config.data, tokenizer, max_tokens=longest)
    held_out = load_held_out_pairs(config.data, tokenizer, max_tokens=longest)
    model, params = load_model(
        config.model.path,
        layout=layout,
        dtype=policy.params,
        remat=config.train.remat,
        attention=config.train.attention,
    )
    reference: Params = jax.jit(precision.cast, static_argnums=1)(params, policy.compute)
    optimizer = make_optimizer(config.optimizer, total_steps=config.train.steps, specs=model.specs)
    learner = make_learner(
        model,
        goal,
        optimizer=optimizer.transformation,
        precision=policy,
        rows_per_microbatch=config.microbatch_rows,
        param_shardings=layout.tree(model.specs) if layout.mesh.size > 1 else None,
    )
    score = jax.jit(learner.score)

    def prepare(minibatch: Minibatch) -> Minibatch:
        return dataclasses.replace(minibatch, reference=score(reference, minibatch))

    @jax.jit
    def compare(logprobs: jax.Array, minibatch: Minibatch) -> Metrics:
        scores = Scores(logprobs=logprobs, reference=minibatch.reference)
        return goal.total(scores, minibatch.batch)[1]

    shape = supervised_shape(config, layout=layout, together=2)
    task = Task(
        title="dpo",
        model=model,
        params=params,
        init=learner.init,
        step=learner.step,
        learning_rate=optimizer.learning_rate,
        batch=pair_batches(training.pairs, config, shape=shape),
        prepare=prepare,
        measure=lambda params: measure_pairs(
            held_out.pairs,
            lambda minibatch: compare(score(params, minibatch), prepare(minibatch)),
            batch_size=config.train.batch_size,
            shape=shape,
        ),
        notes=too_long_note("data.path", training.too_long, config=config)
        + too_long_note("data.eval_path", held_out.too_long, config=config),
    )
    return fit(config, task, layout=layout, eval_every=config.eval.every)


def load_loss(config: PairLossConfig) -> PairLoss:
    """Builds the loss that `loss.name` and its parameters describe.

    Raises:
      ValueError: for a name that cannot be loaded, or a parameter that the loss does not take or
        refuses; the message names the key.
    """
    make = plugins.load_function(config.name, builtin=preference, key="loss.name")
    plugins.check_parameters(make, config.parameters, key="loss")
    loss = make(**from_config.arguments(make, config.parameters))
    if not isinstance(loss, PairLoss):
        raise ValueError(
            f"loss.name = {config.name!r}: it returns {type(loss).__name__}, expected a PairLoss"
        )
    return loss
