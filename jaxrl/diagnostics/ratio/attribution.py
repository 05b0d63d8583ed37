"""Beta by module: the difference in arithmetic, divided among the parts of the model that make it.

The learner scores the same tokens several times. Each time one module hands on its results rounded
as the sampler rounds them, and all others stay as the learner computes them. What this changes is
the module's part. Every rounding of the sampler belongs to one module, and operands of 8 bits, if
the sampler alone has them, are a part of their own.

The parts add up in their variances, and not token by token: a rounding error depends on the last
bits of a number, so with another module rounded, too, a module makes other errors of the same size.
"""

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.batch import Minibatch, TokenBatch
from jaxrl.core.casts import as_served
from jaxrl.core.compiled import jit
from jaxrl.core.precision import Precision, sampler_precision
from jaxrl.learner.policy import make_score
from jaxrl.learner.update import make_forward
from jaxrl.models import lora
from jaxrl.models.model import Model
from jaxrl.models.spec import Params
from jaxrl.sharding.transfer import fetch

MODULES: dict[str, str] = {
    "embedding": "rows of the embedding, as they enter the residual stream",
    "norms": "results of all norms: before and after layers, of queries and keys, the last",
    "products": "results of projections, of the feed-forward networks and of experts",
    "cache": "keys and values, as the KV cache holds them",
    "softmax": "queries, attention's weights and its results",
    "stream": "the residual stream, after each addition",
    "head": "logits and log-probs",
}
"""Modules whose roundings are attributed."""


@dataclass(frozen=True, kw_only=True)
class _Narrowed(Precision):
    """A learner's policy, with the results of some modules rounded as the sampler rounds them."""

    to: Precision
    modules: frozenset[str]

    def rounded(self, x: jax.Array, module: str) -> jax.Array:
        if module in self.modules:
            x = x.astype(self.to.activations)
        return x.astype(self.activations)

    def inside(self, module: str) -> Precision:
        own = {f.name: getattr(self, f.name) for f in fields(Precision) if f.init}
        if module not in self.modules:
            return Precision(**own)
        if module == "head":
            return Precision(**own | {"logits": self.to.logits})
        return Precision(**own | {"compute": self.to.compute, "activations": self.to.activations})


class Attribution(NamedTuple):
    """Beta of M action tokens by part, f64[M] each, in nats.

    `parts` are the `MODULES`; "weights", their rounding; "rest", what the sampler rounds outside of
    the modules; "blocks", operands of 8 bits, if the sampler alone has them; and of a mixture of
    experts "router", the choice of other experts than the learner's, with which all other parts are
    computed.
    """

    parts: dict[str, np.ndarray]
    whole: np.ndarray  # beta, learner - shadow
    tokens: np.ndarray  # i64[M], ids
    shadow: np.ndarray  # log-probs
    sampler: np.ndarray  # log-probs, NaN where it reported none

    def numbers(self) -> dict[str, float]:
        """Computes "PART" and "PART_std", mean and standard deviation of each part and of "whole",
        which is beta; "PART_share" of the parts' summed variances; and "sum" and "sum_std", the
        parts' summed means and the root of their summed variances, which are beta's if the parts
        are independent."""
        total = sum(part.var() for part in self.parts.values())
        found = {"whole": float(self.whole.mean()), "whole_std": float(self.whole.std())}
        for name, part in self.parts.items():
            found |= {name: float(part.mean()), f"{name}_std": float(part.std())}
            found[f"{name}_share"] = float(part.var() / total) if total else 0.0
        found["sum"] = float(sum(part.mean() for part in self.parts.values()))
        found["sum_std"] = float(total**0.5)
        return found

    def worst(self, count: int) -> list[int]:
        """Returns the places of the tokens with the largest |beta|, the worst first."""
        return np.argsort(-np.abs(self.whole), kind="stable")[:count].tolist()


def attribute(
    model: Model,
    params: Any,
    minibatch: Minibatch,
    *,
    precision: Precision | str,
    served: Precision | str | None = None,
    param_shardings: Any = None,
) -> Attribution:
    """Divides beta among the parts of a model, at the action tokens of a minibatch.

    Roundings inside latent attention and the recurrences of linear layers are in no module; what
    they do is in "rest".

    Args:
      model: the learner's.
      params: the learner's parameters.
      minibatch: as for `Learner.score`; experts that it records are not replayed.
      precision: the dtype policy. Its `sampler` and `wire` are the sampler's.
      served: another policy for the sampler, such as one whose head computes in another dtype.
      param_shardings: as for `make_learner`.

    Raises:
      ValueError: if the learner's `compute` and `activations` are not at least as wide as the
        sampler's, so that the sampler does not round what the learner does not.
    """
    own, to = Precision.of(precision), sampler_precision(served or precision)
    _check_wider(own, to)
    bare = replace(minibatch.batch, experts=None)
    free = replace(minibatch, batch=bare, anchor=None, reference=None)
    weights = jit(lambda p: as_served(lora.merge(p), served or precision))(params)

    def score(params: Any, batch: Minibatch, precision: Precision) -> np.ndarray:
        merged = not isinstance(params, lora.Adapted)
        shardings = lora.merged_shardings(param_shardings) if merged else param_shardings
        scored = make_score(model, precision=precision, param_shardings=shardings)
        found = fetch(jit(scored, sums=own.sums)(params, batch))
        return found[mask].astype(np.float64)

    mask, ids, sampled = fetch((bare.action_mask, bare.tokens, bare.sampler_logprobs))
    fixed = free
    if model.hidden_routed is not None:
        route = make_forward(functools.partial(_experts, model, precision=own), precision=own)
        fixed = replace(free, batch=replace(bare, experts=jit(route)(params, free)))
    given: dict[str, Any] = {f.name: getattr(own, f.name) for f in fields(Precision) if f.init}

    def narrowed(*modules: str, **changes: Any) -> np.ndarray:
        mixed = _Narrowed(**given | changes, to=to, modules=frozenset(modules))
        return score(weights, fixed, mixed)

    learner, shadow = score(params, fixed, own), score(weights, free, to)
    plain, cached = score(weights, fixed, own), narrowed("cache")
    parts = {"weights": learner - plain}
    for module in MODULES:
        # Inside attention keys and values are operands: without the cache they would count twice.
        apart = cached - narrowed("cache", module) if module == "softmax" else None
        parts[module] = plain - narrowed(module) if apart is None else apart
    replayed = shadow if model.hidden_routed is None else score(weights, fixed, to)
    differs = Precision.of(served or precision).blocks != own.blocks
    blocks = {"blocks": to.blocks} if differs else {}
    if blocks:
        parts["blocks"] = plain - narrowed(**blocks)
    parts["rest"] = narrowed(*MODULES, **blocks) - replayed
    if model.hidden_routed is not None:
        parts["router"] = replayed - shadow
    recorded = sampled[mask].astype(np.float64)
    return Attribution(parts, learner - shadow, ids[mask].astype(np.int64), shadow, recorded)


def _experts(model: Model, weights: Params, batch: TokenBatch, *, precision: Precision) -> Any:
    assert model.hidden_routed is not None
    inputs = (weights, batch.tokens, batch.positions, batch.segments)
    return model.hidden_routed(*inputs, precision=precision, seen_until=batch.seen_until).experts


def _check_wider(own: Precision, to: Precision) -> None:
    for role in ("compute", "activations"):
        mine, theirs = getattr(own, role), getattr(to, role)
        if jnp.promote_types(mine, theirs) != mine:
            raise ValueError(
                f"{role} = {mine.name} does not hold the sampler's {theirs.name}, so its roundings "
                "cannot be told apart; use a learner in f32, such as precision = 'phantom'"
            )
