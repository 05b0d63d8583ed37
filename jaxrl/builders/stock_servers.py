"""vLLM servers without jaxrl's engine: recognised by what they answer, their base model checked."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import closing

import jax.numpy as jnp
import numpy as np

from jaxrl.bridge import PublishBase, RefusedError, StockServer, UnavailableError, VllmServer
from jaxrl.builders.teacher import score_completions
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.core import MinibatchShape, Rollout, as_served, given_rollout, jit, sampler_precision
from jaxrl.learner import make_score
from jaxrl.losses import k3
from jaxrl.models import Params
from jaxrl.sampling import SamplerError, SamplingParams, StockSampler
from jaxrl.sharding import Layout

_PROMPTS, _GROUP, _TOKENS = 4, 4, 32  # of the check
_ROW = 128  # tokens; kernels work in blocks of it
# Standard deviation of a token's log-prob between the engines, in roundings; measured were up to 17
# (docs/lora.md).
_ROUNDINGS = 32
_LEAST = 1e-6  # nats; f32 log-probs differ by 5e-5 at most, which gives 1e-9

Client = Callable[[Sequence[str]], StockSampler]
"""Addresses of servers -> a client of them."""


def all_stock(servers: Sequence[VllmServer], *, adapters: bool) -> bool:
    """Tells whether the servers lack jaxrl's engine.

    Raises:
      ValueError: if only some do, or they would get whole weights.
    """
    found = {server.url: server.is_stock() for server in servers}
    lacking = [url for url, stock in found.items() if stock]
    others = [url for url, stock in found.items() if stock is False]
    if lacking and not adapters:
        raise ValueError(
            f"sampler.url: {lacking[0]} is a vLLM server without jaxrl's engine and takes no "
            "weights; start it with jaxrl serve, or publish adapters alone (lora.rank, "
            "lora.publish = 'adapters')"
        )
    if lacking and others:
        raise ValueError(
            f"sampler.url: {lacking[0]} is a vLLM server without jaxrl's engine, and {others[0]} "
            "has it; use servers of one kind"
        )
    return bool(lacking)


def make_base_check(weights: WeightRoute, *, layout: Layout, client: Client) -> PublishBase:
    """Builds a function that takes the place of publishing the base weights: it compares the
    servers' base models with the learner's, by log-probs of tokens that the servers sample.

    Servers that pass are marked with the version. The function raises RefusedError if none passes;
    the message names the first that does not, with the divergence.
    """
    score = _make_score(weights, layout=layout)

    def check(servers: Sequence[VllmServer], base: Params, version: int) -> None:
        failures = list[Exception]()
        for server in servers:
            assert isinstance(server, StockServer)
            try:
                server.serves(str(version))  # reads its name for the base model
                with closing(client([server.url])) as sampler:
                    _check_base(
                        sampler, server, weights=weights, score=functools.partial(score, base)
                    )
                server.accept(str(version))
            except (SamplerError, UnavailableError, RefusedError) as error:
                server.fail(error)
                failures.append(error)
        if len(failures) == len(servers):
            refusals = [error for error in failures if isinstance(error, RefusedError)]
            raise refusals[0] if refusals else UnavailableError(str(failures[0]))

    return check


def _make_score(
    weights: WeightRoute, *, layout: Layout
) -> Callable[[Params, Sequence[Rollout]], Sequence[np.ndarray]]:
    """Returns a function that scores completions with base weights in the sampler's dtypes."""
    model, precision = weights.model._replace(temperature=1.0), weights.precision
    shardings = layout.constraints(model.specs)
    score = make_score(model, precision=sampler_precision(precision), param_shardings=shardings)
    compiled = jit(
        lambda base, minibatch: score(as_served(base, precision), minibatch), sums=precision.sums
    )
    size = layout.mesh.size
    shape = MinibatchShape(
        row_length=_ROW * math.prod(layout.mesh.shape[axis] for axis in layout.axes("length")),
        rows_per_microbatch=size * -(-_PROMPTS * _GROUP // size),
        packed=False,
        sharding=layout.batch(("batch", "length")),
    )
    return lambda base, rollouts: score_completions(
        rollouts, score=functools.partial(compiled, base), shape=shape
    )


def _check_base(
    sampler: StockSampler,
    server: StockServer,
    *,
    weights: WeightRoute,
    score: Callable[[Sequence[Rollout]], Sequence[np.ndarray]],
) -> None:
    sampler.use_version(0, urls=[server.url], adapter=server.base)
    sizes, precision = weights.model.config, weights.precision
    prompts = np.random.default_rng(0).integers(0, sizes.vocab_size, (_PROMPTS, 1), np.int32)
    best = SamplingParams(max_tokens=1, temperature=0.5, top_k=1)
    (one,) = sampler.sample(list(prompts[:1]), best, group_size=1)
    if one.logprobs[0] != 0.0:  # of the only token that remains
        raise RefusedError(
            f"{server.url} reports log-probs before temperature and truncation (with top_k = 1 a "
            f"token has {one.logprobs[0]:.3g}); start it with --logprobs-mode processed_logprobs"
        )
    plain = SamplingParams(max_tokens=min(_TOKENS, sizes.max_positions - 1))
    drawn = list(sampler.sample(list(prompts), plain, group_size=_GROUP))
    own = score([given_rollout(prompts[c.prompt_index].tolist(), c.tokens.tolist()) for c in drawn])
    theirs = np.concatenate([c.logprobs for c in drawn])
    divergence = float(k3(jnp.asarray(np.concatenate(own) - theirs)).mean())
    rounding = _ROUNDINGS * float(jnp.finfo(precision.sampler).eps)
    most = max(_LEAST, rounding**2 / 2)
    if not divergence <= most:
        raise RefusedError(
            f"{server.url} has another base model than {weights.checkpoint.directory}, or another "
            f"dtype than {precision.sampler.name} (precision.sampler): over {theirs.size} tokens "
            f"that it sampled, the divergence from the learner is {divergence:.2g} nats a token, "
            f"and roundings explain at most {most:.2g}; serve that model with --dtype "
            f"{precision.sampler.name}"
        )
