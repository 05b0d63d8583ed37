"""Loads the reward model that a config names."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.builders.layout import own_layout
from jaxrl.builders.model import ModelFiles, Output, check_token_ids, load_model
from jaxrl.builders.rows import minibatch_shape
from jaxrl.config.training import Config
from jaxrl.core import MinibatchShape, Rollout, jit, pack_minibatch, plan_rows
from jaxrl.learner import ScoreRows, make_scores
from jaxrl.models import Model, Params
from jaxrl.sharding import Layout, fetch

RewardModel = Callable[[Sequence[Rollout]], np.ndarray]
"""Rollouts -> the reward of each, f64[N]."""


def load_reward_model(config: Config, models: ModelFiles, *, layout: Layout) -> RewardModel:
    """Loads the reward model of a run. It runs on the learner's devices in `precision.compute`;
    rows and microbatches are the learner's. Raises as `load_scorer`."""
    layout = own_layout(config, "reward_mesh", shared=layout)
    model, params = load_scorer(config, models, layout=layout, output="scores")
    shardings = layout.constraints(model.specs)
    scores = make_scores(model, precision=config.precision, param_shardings=shardings)
    scores = jit(scores, sums=config.precision.sums)
    shape = minibatch_shape(config, layout)
    return functools.partial(score_rollouts, params=params, scores=scores, shape=shape)


def score_rollouts(
    rollouts: Sequence[Rollout], *, params: Params, scores: ScoreRows, shape: MinibatchShape
) -> np.ndarray:
    """Returns the compiled `scores` of each rollout, f64[N]; NaN where they are not finite."""
    # Sized for the worst case, one sequence per row, so that it compiles once.
    shape = dataclasses.replace(shape, max_rows=len(rollouts))
    minibatch = pack_minibatch(rollouts, [0.0] * len(rollouts), shape=shape)
    found = np.asarray(fetch(scores(params, minibatch)), np.float64)
    values = np.zeros(len(rollouts))
    for row, members in enumerate(plan_rows(rollouts, shape).members):
        values[list(members)] = found[row, 1 : len(members) + 1]
    return np.where(np.isfinite(values), values, np.nan)


def load_scorer(
    config: Config, models: ModelFiles, *, layout: Layout, output: Output
) -> tuple[Model, Params]:
    """Loads reward.model, which reads the token ids of the policy, in `precision.compute`.

    Raises:
      ValueError: as `load_model` and `check_token_ids`.
    """
    scorer, path = models.scorer, config.reward.model
    assert scorer is not None
    check_token_ids(scorer, models.policy, key=f"reward.model = {path!r}")
    return load_model(scorer, layout=layout, dtype=config.precision.compute, output=output)
