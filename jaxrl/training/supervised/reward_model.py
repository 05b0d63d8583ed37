"""Trains a reward model on pairs of completions (Bradley-Terry)."""

from typing import Any

import jax

from jaxrl.builders.layout import make_layout
from jaxrl.builders.minibatches import supervised_shape
from jaxrl.builders.model import load_scorer
from jaxrl.builders.optimizer import make_optimizer
from jaxrl.config.preference import RewardModelConfig
from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import Metrics
from jaxrl.learner.reward_model import make_ranker, make_scores
from jaxrl.losses.preference import ranked
from jaxrl.models import huggingface
from jaxrl.models.spec import Params
from jaxrl.training.supervised.fit import Result, Task, fit, too_long_note
from jaxrl.training.supervised.pairs import (
    load_held_out_pairs,
    load_training_pairs,
    measure_pairs,
    pair_batches,
)


def train_reward_model(config: RewardModelConfig) -> Result:
    """Trains for `config.train.steps` steps, or until a signal, and saves the reward model.

    The initial model is a language model, which scores every text 0, or a reward model.

    Raises:
      ResumeError, CheckpointError: as `supervised.fit`.
      ValueError: for data, a model or a run directory that cannot be used; the message names it.
    """
    policy = config.policy
    layout = make_layout(config.mesh)
    tokenizer = huggingface.load_tokenizer(config.model.path)
    longest = config.train.row_length
    training = load_training_pairs(config.data, tokenizer, max_tokens=longest)
    held_out = load_held_out_pairs(config.data, tokenizer, max_tokens=longest)
    model, params = load_scorer(
        config.model.path,
        layout=layout,
        dtype=policy.params,
        remat=config.train.remat,
        attention=config.train.attention,
    )
    optimizer = make_optimizer(config.optimizer, total_steps=config.train.steps, specs=model.specs)
    center_rewards = config.loss.center_rewards
    shared: dict[str, Any] = {
        "precision": policy,
        "rows_per_microbatch": config.microbatch_rows,
        "param_shardings": layout.tree(model.specs) if layout.mesh.size > 1 else None,
    }
    learner = make_ranker(
        model, center_rewards=center_rewards, optimizer=optimizer.transformation, **shared
    )
    scores = make_scores(model, **shared)

    @jax.jit
    def measure(params: Params, minibatch: Minibatch) -> Metrics:
        return ranked(scores(params, minibatch), minibatch.batch, center_rewards=center_rewards)[1]

    shape = supervised_shape(config, layout=layout, together=2)
    task = Task(
        title="reward model",
        model=model,
        params=params,
        init=learner.init,
        step=learner.step,
        learning_rate=optimizer.learning_rate,
        batch=pair_batches(training.pairs, config, shape=shape),
        measure=lambda params: measure_pairs(
            held_out.pairs,
            lambda minibatch: measure(params, minibatch),
            batch_size=config.train.batch_size,
            shape=shape,
        ),
        notes=too_long_note("data.path", training.too_long, config=config)
        + too_long_note("data.eval_path", held_out.too_long, config=config),
    )
    return fit(config, task, layout=layout, eval_every=config.eval.every)
