"""A reward model from pairs of answers: the chosen one shall be worth more (Bradley-Terry)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxrl.builders import parts
from jaxrl.config.preference import RewardModelConfig
from jaxrl.core import precision
from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision
from jaxrl.data.pairs import load_held_out_pairs, load_training_pairs, measure_pairs, pack_pairs
from jaxrl.learner.policy import LearnerState, Minibatch
from jaxrl.learner.reward_model import make_scores
from jaxrl.learner.update import make_update
from jaxrl.losses.preference import pair_count, ranked
from jaxrl.models import huggingface
from jaxrl.models.decoder import Model
from jaxrl.models.scorer import sequence_scores
from jaxrl.models.spec import Params
from jaxrl.training.supervised.fit import Result, Task, fit, left_out, take


def train_reward_model(config: RewardModelConfig) -> Result:
    """Trains for `config.train.steps` steps, or until a signal comes, and saves the reward model.

    It begins from a language model, with a score of 0 for every text, or from a reward model.

    Raises:
      ResumeError, CheckpointError: as `supervised.fit`.
      ValueError: for data, a model or a run directory that cannot be used; the message names it.
    """
    policy = precision.parse(config.precision)
    layout = parts.make_layout(config.mesh)
    tokenizer = huggingface.load_tokenizer(config.model.path)
    longest = config.train.row_length
    training = load_training_pairs(config.data, tokenizer, max_tokens=longest)
    held_out = load_held_out_pairs(config.data, tokenizer, max_tokens=longest)
    model, params = parts.load_scorer(
        config.model.path,
        layout=layout,
        dtype=policy.params,
        remat=config.train.remat,
        attention=config.train.attention,
    )
    optimizer = parts.make_optimizer(
        config.optimizer, total_steps=config.train.steps, specs=model.specs
    )
    centring = config.loss.centring
    shared: dict[str, Any] = {
        "precision": policy,
        "rows_per_microbatch": config.microbatch_rows,
        "param_shardings": layout.tree(model.specs) if layout.mesh.size > 1 else None,
    }
    learner = make_ranker(model, centring=centring, optimizer=optimizer.transformation, **shared)
    scores = make_scores(model, **shared)

    @jax.jit
    def measure(params: Params, minibatch: Minibatch) -> Metrics:
        return ranked(scores(params, minibatch), minibatch.batch, centring=centring)[1]

    task = Task(
        title="reward model",
        model=model,
        params=params,
        init=learner.init,
        step=learner.step,
        learning_rate=optimizer.learning_rate,
        batch=lambda step: pack_pairs(
            [training.pairs[i] for i in take(len(training.pairs), step=step, config=config)], config
        ),
        measure=lambda params: measure_pairs(
            held_out.pairs, lambda minibatch: measure(params, minibatch), config, layout=layout
        ),
        notes=left_out("data.path", training.too_long, config)
        + left_out("data.eval_path", held_out.too_long, config),
    )
    return fit(config, task, layout=layout, eval_every=config.eval.every)


class Ranker(NamedTuple):
    """A learner of rewards: pure functions, as those of `learner.Learner`."""

    init: Callable[[Params], LearnerState]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def make_ranker(
    model: Model,
    *,
    centring: float,
    optimizer: optax.GradientTransformation,
    precision: Precision,
    rows_per_microbatch: int,
    param_shardings: Any = None,
) -> Ranker:
    """Builds the learner of a reward model.

    Args:
      model: a scorer.
      centring: as in `preference.bradley_terry`.
      optimizer: any optax transformation.
      precision: the dtype policy.
      rows_per_microbatch: rows that are computed at once; divides the rows of every minibatch.
      param_shardings: tree of shardings of the parameters; None on a single device.
    """

    def total(weights: Params, batch: TokenBatch, fixed: None) -> tuple[jax.Array, Metrics]:
        del fixed
        scores = sequence_scores(model, weights, batch, precision=precision)
        return ranked(scores, batch, centring=centring)

    update = make_update(
        total,
        optimizer=optimizer,
        precision=precision,
        rows_per_microbatch=rows_per_microbatch,
        param_shardings=param_shardings,
    )

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        return update.step(
            state,
            minibatch.batch,
            fixed=None,
            denominator=pair_count(minibatch.batch),
            microbatches=minibatch.microbatches,
        )

    return Ranker(update.init, step)
