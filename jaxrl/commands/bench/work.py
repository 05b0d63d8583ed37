"""The measurements of `jaxrl bench`, each with random weights on one device."""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.bridge import ParamsSource
from jaxrl.builders.layout import make_layout
from jaxrl.commands.bench.sizes import Work
from jaxrl.commands.plan.chips import CHIPS, products
from jaxrl.commands.plan.roofline import forward_flops
from jaxrl.config.mesh import MeshConfig
from jaxrl.core import MinibatchShape, Precision, cast, given_rollout, jit, pack_minibatch
from jaxrl.diagnostics import split, split_log_ratio
from jaxrl.learner import Learner, make_learner
from jaxrl.losses import grpo
from jaxrl.models import (
    DecoderConfig,
    Kernel,
    Model,
    Params,
    attend_by,
    choose_kernel,
    decoder,
    init,
    product,
    reserves_by_run,
    sequence_alignment,
)
from jaxrl.sampling import EmbeddedSampler, SamplingParams

_GROUP = 8  # completions of a prompt
_SHARPER = 5.0  # factor of the final norm: random weights become as decided as a language model
_KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}

Numbers = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model with random f32 weights, and the sizes of the work."""

    model: Model
    params: Params
    work: Work
    kernel: Callable[[Precision], Kernel]  # that computes attention
    shape: Callable[[Precision], MinibatchShape]  # of the learner's batch


def build(config: DecoderConfig, work: Work) -> Bench:
    """Makes the decoder and random weights on the first device."""
    layout = make_layout(MeshConfig())
    attend = attend_by(work.attention, layout=layout, config=config)
    model = decoder(config, remat=work.remat, layout=layout, attend=attend)
    params = init(model.specs, jax.random.key(0), dtype=np.dtype(np.float32))

    def kernel(precision: Precision) -> Kernel:
        return choose_kernel(
            work.attention, layout=layout, config=config, precision=precision, length=work.row
        )

    def shape(precision: Precision) -> MinibatchShape:
        bound = reserves_by_run(kernel(precision), layout)
        align = sequence_alignment(precision)
        return MinibatchShape(
            row_length=work.row, rows_per_microbatch=1, align=align, bound_runs=bound
        )

    return Bench(model, params, work, kernel, shape)


def learner(bench: Bench, precision: Precision) -> Numbers:
    """Times GRPO steps on packed rows of equal sequences. The model FLOPs of a step are three
    forward passes, causal attention within sequences and the head at completions only."""
    work, config = bench.work, bench.model.config
    rng, count = np.random.default_rng(0), work.row // work.sequence * work.microbatches
    tokens = rng.integers(10, config.vocab_size, (count, work.sequence))
    rollouts = [
        given_rollout(one[: work.prompt].tolist(), one[work.prompt :].tolist())._replace(
            logprobs=rng.normal(-np.log(config.vocab_size), 0.1, work.sequence - work.prompt)
        )
        for one in tokens
    ]
    shape = bench.shape(precision)
    minibatch = pack_minibatch(rollouts, list(rng.normal(size=count)), shape=shape)
    built: Any = _learner(bench.model, precision)
    state = jit(built.init, donate_argnums=0)(_copy(bench.params, precision))
    step = built.step.lower(state, minibatch).compile()

    def run() -> None:
        nonlocal state
        state, _ = step(state, minibatch)
        jax.block_until_ready(state)

    best = _fastest(run, repetitions=work.repetitions)
    forward = forward_flops(config, bench.model.specs, rows=count, length=work.sequence)
    flops = 3 * (forward - 2 * count * work.prompt * config.vocab_size * config.hidden_size)
    memory = step.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak, source = _peak(precision)
    return {
        "attention": bench.kernel(precision),
        "tokens/s": tokens.size / best,
        "model TFLOP/s": flops / best / 1e12,
        "peak TFLOP/s": peak / 1e12,
        "peak by": source,
        "MFU": flops / best / peak,
        "GiB": held / 2**30,
    }


def decode(bench: Bench, precision: Precision) -> Numbers:
    """Times whole batches of completions of the embedded sampler, and a load of new weights."""
    work = bench.work
    sampler = EmbeddedSampler(
        bench.model, bench.params, precision=precision, max_batch=work.sequences
    )
    best = _fastest(lambda: _sample(sampler, bench), repetitions=work.repetitions)

    def load() -> None:
        sampler.load(bench.params, version=1)
        jax.block_until_ready(jax.live_arrays())

    loading = _fastest(load, repetitions=work.repetitions)
    sampler.close()
    return {"tokens/s": work.sequences * work.completion / best, "seconds of a load": loading}


def publish(bench: Bench, precision: Precision) -> Numbers:
    """Times the cast of all weights to the wire's dtype and their copy to the host, as for a server
    on the same machine, which then copies them once more."""
    params = _copy(bench.params, precision)

    def run() -> None:
        deque(ParamsSource(params, bench.model.specs, dtype=precision.wire), maxlen=0)

    best = _fastest(run, repetitions=bench.work.repetitions)
    size = sum(x.size for x in jax.tree.leaves(params)) * precision.wire.itemsize
    return {"seconds": best, "GB": size / 1e9, "GB/s": size / best / 1e9}


def beta(bench: Bench, precision: Precision) -> Numbers:
    """Compares the log-probs of learner and sampler at equal weights, on completions of the
    sampler: the log-ratio is beta alone."""
    params = bench.params | {"final_norm": bench.params["final_norm"] * _SHARPER}
    sampler = EmbeddedSampler(
        bench.model, params, precision=precision, max_batch=bench.work.sequences
    )
    rollouts = _sample(sampler, bench)
    sampler.close()
    minibatch = pack_minibatch(
        rollouts,
        list(np.random.default_rng(0).normal(size=len(rollouts))),
        shape=bench.shape(precision),
    )
    found = split(
        _learner(bench.model, precision), minibatch, params=_copy(params, precision)
    ).tokens()
    numbers = split_log_ratio(found, low=0.2, high=0.2)
    total = found.learner - found.sampler
    kept = ("k3_kl", "chi2_sequence", "clipped", "prob_diff_max")
    return {"std": float(total.std()), **{name: float(numbers[name]) for name in kept}}


def _learner(model: Model, precision: Precision) -> Learner:
    """Makes a learner, compiled as in a run."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0))
    made = make_learner(model, grpo().objective, optimizer=optimizer, precision=precision)
    compiled = functools.partial(jit, sums=precision.sums)
    return made._replace(
        score=compiled(made.score),
        shadow_scores=compiled(made.shadow_scores),
        step=compiled(made.step, donate_argnums=0),
    )


def _copy(params: Params, precision: Precision) -> Params:
    """Returns the weights in the learner's dtype; a step may donate them."""
    return jax.tree.map(jnp.copy, cast(params, precision.params))


def _sample(sampler: EmbeddedSampler, bench: Bench) -> list[Any]:
    """Draws the completions of random prompts, of equal length."""
    work, vocabulary = bench.work, bench.model.config.vocab_size
    prompts = np.random.default_rng(0).integers(
        10, vocabulary, (work.sequences // _GROUP, work.prompt // 2)
    )
    params = SamplingParams(max_tokens=work.completion, seed=0)
    drawn = sampler.sample(list(prompts.astype(np.int32)), params, group_size=_GROUP)
    return [
        given_rollout(prompts[c.prompt_index].tolist(), c.tokens.tolist())._replace(
            logprobs=np.asarray(c.logprobs)
        )
        for c in drawn
    ]


def _fastest(run: Callable[[], object], *, repetitions: int) -> float:
    """Returns the seconds of the fastest call, after one that compiles."""
    run()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _peak(precision: Precision) -> tuple[float, str]:
    """Returns FLOP/s of the products of a dtype policy: by the chip's data sheet, or of a large
    product measured here."""
    kind = jax.devices()[0].device_kind
    # GPUs are named such as "NVIDIA H100 80GB HBM3" and "NVIDIA A100-SXM4-80GB".
    name = _KINDS.get(kind) or next((name for name in CHIPS if name in kind.lower()), None)
    if name is not None and (found := products(precision, CHIPS[name])) is not None:
        return found.rate, f"data sheet of {name}"
    size = 2048
    x = jnp.ones((size, size), precision.compute)
    squared = jit(lambda x: product(x, x, contract=(1, 0), precision=precision))
    seconds = _fastest(lambda: squared(x).block_until_ready(), repetitions=8)
    return 2 * size**3 / seconds, f"a product of {size} x {size} measured here"
