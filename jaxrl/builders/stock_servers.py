"""vLLM servers without jaxrl's engine: recognised by their answers; base, dtype, head checked."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import closing

import jax.numpy as jnp
import numpy as np

from jaxrl.bridge import (
    ControlError,
    PublishBase,
    RefusedError,
    StockServer,
    UnavailableError,
    VllmServer,
)
from jaxrl.builders.served_head import rounds_logits, sampled_gaps
from jaxrl.builders.teacher import score_completions
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.core import (
    MinibatchShape,
    Precision,
    Rollout,
    as_served,
    given_rollout,
    jit,
    sampler_precision,
    short_name,
)
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
# Two engines in f16 differ by .18 of what f16 and bf16 do if errors are independent.
_NEARER = 0.4

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
    servers' base models and dtypes with the learner's, by log-probs of tokens that the servers
    sample, and the dtype of their heads with `precision.logits`.

    Servers that pass are marked with the version. The function raises RefusedError if none passes;
    the message names the first that does not, with the divergence.
    """
    make = functools.partial(_make_score, weights, layout=layout)
    score = make(weights.precision)
    with_f32_head = functools.partial(dataclasses.replace, weights.precision, logits="f32")
    f16, bf16 = (make(with_f32_head(sampler=dtype)) for dtype in (jnp.float16, jnp.bfloat16))

    def check(servers: Sequence[VllmServer], base: Params, version: int) -> None:
        failures = list[Exception]()
        for server in servers:
            assert isinstance(server, StockServer)
            try:
                server.serves(str(version))  # reads its name for the base model
                with closing(client([server.url])) as sampler:
                    rollouts, theirs = _sample(sampler, server, weights=weights)
                _check_base(score(base, rollouts), theirs, server=server, weights=weights)
                if weights.precision.sampler.itemsize == 2:
                    _check_dtype(
                        theirs,
                        f16=f16(base, rollouts),
                        bf16=bf16(base, rollouts),
                        server=server,
                        wanted=weights.precision.sampler,
                    )
                check_head(server, weights)
                server.accept(str(version))
            except (SamplerError, ControlError, UnavailableError, RefusedError) as error:
                server.fail(error)
                failures.append(error)
        if len(failures) == len(servers):
            refusals = [error for error in failures if isinstance(error, RefusedError)]
            raise refusals[0] if refusals else UnavailableError(str(failures[0]))

    return check


def _make_score(
    weights: WeightRoute, precision: Precision, *, layout: Layout
) -> Callable[[Params, Sequence[Rollout]], np.ndarray]:
    """Returns a function that computes the log-probs of completions, f32[tokens], with base weights
    in the sampler's dtypes."""
    model = weights.model._replace(temperature=1.0)
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
    return lambda base, rollouts: np.concatenate(
        score_completions(rollouts, score=functools.partial(compiled, base), shape=shape)
    )


def _sample(
    sampler: StockSampler, server: StockServer, *, weights: WeightRoute
) -> tuple[list[Rollout], np.ndarray]:
    """Samples completions, and returns the server's log-probs of all their tokens, f32[tokens]."""
    sampler.use_version(0, urls=[server.url], adapter=server.base)
    sizes = weights.model.config
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
    rollouts = [given_rollout(prompts[c.prompt_index].tolist(), c.tokens.tolist()) for c in drawn]
    return rollouts, np.concatenate([c.logprobs for c in drawn])


def _check_base(
    own: np.ndarray, theirs: np.ndarray, *, server: StockServer, weights: WeightRoute
) -> None:
    precision = weights.precision
    divergence = float(k3(jnp.asarray(own - theirs)).mean())
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


def _check_dtype(
    theirs: np.ndarray, *, f16: np.ndarray, bf16: np.ndarray, server: StockServer, wanted: np.dtype
) -> None:
    """Raises RefusedError if a server does not compute in `wanted`, f16 or bf16: one in bf16 is as
    far from the learner in f16 as the learner in bf16 is, and any other one much nearer. Medians,
    because a few tokens may have other experts."""
    far, near = (float(np.median(np.abs(one - f16))) for one in (bf16, theirs))
    if (near > _NEARER * far) == (wanted == jnp.bfloat16):
        return
    found = "float16 or float32" if wanted == jnp.bfloat16 else "bfloat16"
    raise RefusedError(
        f"{server.url} computes in {found} and the learner expects {wanted.name} "
        f"(precision.sampler): the median difference from the learner's log-probs in float16 is "
        f"{near:.2g} nats, that of bfloat16 {far:.2g}; start it with --dtype {wanted.name}, or "
        "change precision"
    )


def check_head(server: StockServer, weights: WeightRoute) -> None:
    """Compares the dtype of the server's logits with `precision.logits`.

    Raises:
      RefusedError: if they differ.
      ControlError: if the server does not answer.
    """
    precision, sizes = weights.precision, weights.model.config
    if precision.sampler == jnp.float32:
        return  # no other dtype is possible
    gaps = sampled_gaps(server, sizes, model=server.base, longest=sizes.max_positions)
    rounded = rounds_logits(gaps, dtype=precision.sampler)
    if rounded is None or rounded == (precision.logits == precision.sampler):
        return
    served, wanted = precision.sampler, jnp.dtype(jnp.float32)
    if not rounded:
        served, wanted = wanted, served
    raise RefusedError(
        f"the head of {server.url} computes in {served.name} and the learner's logits are "
        f"{wanted.name}; start the server with --hf-overrides "
        f'\'{{"head_dtype": "{wanted.name}"}}\', or train with logits={short_name(served)} in '
        "precision"
    )
