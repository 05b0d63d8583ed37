"""Operands of the algebra: checks with errors that name what to write instead."""

import numbers
from typing import Any

import jax
import numpy as np

from jaxrl.losses.formulas import formula_text

# By operation and by the operand that does not fit.
_INSTEAD = {
    ("add", "number"): "a constant has no gradient; scale a loss by it, as in 0.1 * kl_penalty()",
    ("add", "str"): "write a loss without quotes, such as kl_penalty()",
    ("add", "Weights"): "weights multiply; write weights * loss",
    ("add", "Ratio"): "make a loss of a ratio, as in clipped(ratio)",
    ("add", "Recipe"): "write recipe + term, with the one recipe first; of another recipe add the "
    "loss, recipe.objective.loss",
    ("add", "Objective"): "it is reduced already; reduce the other too, as in "
    "objective(loss, aggregation) + 0.1 * positive_likelihood()",
    ("add", "Aggregation"): "write objective(loss, aggregation), once, around the sum",
    ("add", "other"): "write a loss, such as kl_penalty() or token_loss(function)",
    ("multiply", "number"): "scale the loss: write weights * (0.1 * loss)",
    ("multiply", "array"): "factors per token are Weights: write Weights(frozenset(), function) * "
    "loss, where function(scores, batch) returns the factors and a dict of metrics",
    ("multiply", "str"): "write a number, or Weights without quotes, such as "
    "truncated(anchor_over_sampler, high=2.0)",
    ("multiply", "TokenLoss"): "losses are added, a + b, and scaled by numbers, 0.1 * a",
    ("multiply", "Ratio"): "make weights of a ratio, as in truncated(ratio, high=2.0) * loss, or a "
    "loss, as in clipped(ratio)",
    ("multiply", "Recipe"): "scale a term, recipe + 0.1 * term; weights enter by "
    "with_terms(recipe, correction=weights)",
    ("multiply", "Objective"): "it is reduced already; write "
    "objective(weights * loss, aggregation)",
    ("multiply", "other"): "write a number, as in 0.1 * loss, or Weights, as in weights * loss",
}


def number(operand: Any) -> Any:
    """Returns a number, or an array of one number, as it is; raises TypeError for anything else."""
    if _kind(operand) != "number":
        raise TypeError(mistake("multiply", operand, to="a loss"))
    return operand


def mistake(operation: str, operand: Any, *, to: Any) -> str:
    """Returns the message for an operand that does not fit: the value, then what to write.

    Example:
      >>> from jaxrl.losses import over_sampler
      >>> print(mistake("add", over_sampler, to="a loss"))
      cannot add over_sampler to a loss: make a loss of a ratio, as in clipped(ratio)
    """
    target = to if isinstance(to, str) else formula_text(to)
    if operation == "add":
        head = f"cannot add {formula_text(operand)} to {target}"
    else:
        head = f"cannot multiply {target} by {formula_text(operand)}"
    if callable(operand):
        return f"{head}: it is a function; call it, as in {formula_text(operand)}()"
    if operation == "add" and _kind(to) == "Weights":
        return f"{head}: weights multiply; write weights * loss, or weights * weights"
    other = _INSTEAD[operation, "other"]
    return f"{head}: {_INSTEAD.get((operation, _kind(operand)), other)}"


def _kind(operand: Any) -> str:
    if isinstance(operand, numbers.Real) or (isinstance(operand, jax.Array) and operand.ndim == 0):
        return "number"
    if isinstance(operand, jax.Array | np.ndarray):
        return "array"
    return type(operand).__name__
