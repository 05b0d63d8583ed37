"""Checks of a loss on shapes alone, in milliseconds, before anything is sampled or compiled."""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Mean
from jaxrl.losses.objectives import Objective
from jaxrl.losses.recipe import Recipe
from jaxrl.losses.scores import Need, Scores

_SHAPE = (2, 4)  # rows and tokens differ, so that one is not taken for the other


def check_shapes(recipe: Recipe) -> None:
    """Traces the objective of a recipe, with the scores that it declares and no others.

    Raises:
      ValueError: for a loss that is not one number per token, or a metric that is not a Mean.
    """
    batch = _batch(recipe)
    _check(recipe.objective, batch)
    if recipe.critic is not None:
        _check(recipe.critic.objective, batch)


def _check(goal: Objective, batch: TokenBatch) -> None:
    scores = Scores(logprobs=_array(), **{need.value: _array() for need in goal.needs})
    scores, before = jax.eval_shape(goal.survey, scores, batch)
    _, metrics = jax.eval_shape(goal.total, scores, batch)
    for name, metric in [*before.items(), *metrics.items()]:
        if not isinstance(metric, Mean) or metric.total.shape or metric.weight.shape:
            raise ValueError(
                f"the metric {name!r} is {metric}, expected a Mean of two scalars: "
                "jaxrl.core.masked_mean(values, batch.action_mask) makes one"
            )
    jax.eval_shape(goal.denominators, batch, scores.whole)


def _batch(recipe: Recipe) -> TokenBatch:
    # Scores that only a critic's loss may read are refused by `builders.recipe`.
    judged = recipe.critic is not None or Need.VALUES in recipe.objective.needs
    numbers = ["sampler_logprobs", "advantages", "rewards"]
    numbers += ["values", "returns"] if judged else []
    return TokenBatch(
        **{name: _array(jnp.int32) for name in ("tokens", "segments", "positions")},
        **{name: _array() for name in numbers},
        action_mask=_array(jnp.bool_),
        coefficients={name: _array() for name in recipe.controllers},
    )


def _array(dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(_SHAPE, dtype)


@contextlib.contextmanager
def blaming(function: Callable[..., Any], *, name: str) -> Iterator[None]:
    """Turns errors of the block into a ValueError that gives `loss.name` and the traceback's last
    line in the function's file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if "NoneType" in what:
            what += (
                "; a score that the loss does not declare is None: token_loss(apply, "
                "Need.REFERENCE) declares scores.reference"
            )
        file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        line = f" ({file}, line {frames[-1].lineno})" if frames else ""
        raise ValueError(f"loss.name = {name!r}: {what}{line}") from error
