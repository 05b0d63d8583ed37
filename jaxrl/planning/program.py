"""The learner's step of a config, compiled for devices that need not exist."""

import dataclasses
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import parts, precision
from jaxrl.batch import TokenBatch
from jaxrl.config.training import Config
from jaxrl.learner import LearnerState, Minibatch
from jaxrl.losses import Need
from jaxrl.models import huggingface, kernels, logprobs, lora
from jaxrl.models.decoder import Model
from jaxrl.models.families import DecoderConfig
from jaxrl.models.kernels import Kernel
from jaxrl.planning.collectives import Traffic, collectives
from jaxrl.planning.topology import GIB, Topology
from jaxrl.precision import DType, Precision
from sharding.partition import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
      params: master weights.
      optimizer: the optimizer's state.
      host: of the optimizer's state, what is in the host's memory instead.
      gradients: what is accumulated over microbatches; temporary.
      copies: the weights in `compute`, where they are not the master weights; temporary.
      activations: all other temporaries.
      rest: the batch, metrics and the program itself.
      peak: what the program holds at once, all of the above.
    """

    params: float
    optimizer: float
    host: float
    gradients: float
    copies: float
    activations: float
    rest: float
    peak: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled step.

    Attributes:
      model: without weights.
      layout: the mesh and its rules.
      policy: the dtypes.
      kernel: what computes attention.
      rows: of one microbatch, over all devices.
      microbatches: of one optimizer step, at most.
      row_length: tokens of a row.
      seconds: to trace, lower and compile.
      hlo_bytes: length of the program as text.
      memory: None if the compiler refused a program for its memory.
      traffic: what one step sends; empty if there is no program.
      over: what the compiler said it would have needed, bytes, if it refused.
    """

    model: Model
    specs: Any  # of the learner's parameters: the model's, or lora.Adapted
    layout: Layout
    policy: Precision
    kernel: Kernel
    rows: int
    microbatches: int
    row_length: int
    seconds: float
    hlo_bytes: int = 0
    memory: Memory | None = None
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    over: float | None = None


def compile_step(config: Config, topology: Topology) -> Program:
    """Compiles the step that `jaxrl train` would run, on shapes alone.

    Of the model only config.json is read, of data and rewards nothing.

    Raises:
      ValueError: for a model or a mesh that cannot be used, as `jaxrl train` does.
      jax.errors.JaxRuntimeError: if the compiler fails for another reason than memory.
    """
    policy = precision.parse(config.precision)
    layout = parts.make_layout(config.mesh, devices=topology.devices)
    sizes = huggingface.load_config(config.model.path)
    kernel = kernels.choose(
        config.train.attention,
        layout=layout,
        config=sizes,
        precision=policy,
        length=config.row_length,
    )
    model = parts.make_decoder(sizes, layout=layout, remat=config.train.remat, attention=kernel)
    recipe = parts.make_recipe(config)
    specs = parts.trained_specs(config.lora, model.specs)
    optimizer = parts.make_optimizer(
        config.optimizer, total_steps=config.optimizer_steps, specs=lora.trainable(specs)
    )
    learner = parts.make_learner(
        config, model, objective=recipe.objective, optimizer=optimizer, layout=layout
    )
    params = lora.abstract(specs, trained=policy.params, kept=policy.wire)
    shapes = jax.eval_shape(learner.init, params)
    shardings = parts.state_shardings(
        config.optimizer, learner.init, params, layout=layout, specs=lora.declared(specs)
    )
    state = jax.tree.map(_place, shapes, shardings)
    minibatch = _minibatch(config, sizes, layout=layout, needs=recipe.objective.needs)
    microbatches = minibatch.batch.tokens.shape[0] // config.microbatch_rows
    built = {
        "model": model,
        "specs": specs,
        "layout": layout,
        "policy": policy,
        "kernel": kernel,
        "rows": config.microbatch_rows,
        "microbatches": microbatches,
        "row_length": config.row_length,
    }
    start = time.perf_counter()
    step = jax.jit(learner.step, donate_argnums=0, out_shardings=(shardings, None))
    try:
        compiled = step.lower(state, minibatch).compile()
    except jax.errors.JaxRuntimeError as error:
        over = _needed(str(error))
        if over is None:
            raise
        return Program(**built, seconds=time.perf_counter() - start, over=over)
    seconds = time.perf_counter() - start
    hlo = compiled.as_text() or ""
    # The number of microbatches and of chunks with scored tokens are known at run time only.
    trips = (microbatches, logprobs.position_chunks(config.row_length))
    return Program(
        **built,
        seconds=seconds,
        hlo_bytes=len(hlo),
        memory=_memory(compiled.memory_analysis(), state, policy=policy),
        traffic=collectives(hlo, trips=lambda depth: trips[min(depth, 1)]),
    )


def _minibatch(
    config: Config, sizes: DecoderConfig, *, layout: Layout, needs: frozenset[Need]
) -> Minibatch:
    """What `loop.train` gives the step: room for one sequence to a row."""
    answers = config.train.train_batch * config.train.group_size
    count = -(-answers // config.train.updates_per_rollout // config.microbatch_rows)
    rows = layout.batch(("batch", "length"))
    shape = (count * config.microbatch_rows, config.row_length)

    def array(dtype: Any, *more: int) -> Any:
        return jax.ShapeDtypeStruct((*shape, *more), dtype, sharding=rows)

    experts = None
    if config.train.replay_routing and sizes.experts is not None:
        experts = array(jnp.int16, sizes.num_layers, sizes.experts.per_token)
    whole, score = array(jnp.int32), array(jnp.float32)
    batch = TokenBatch(
        tokens=whole,
        segments=whole,
        positions=whole,
        action_mask=array(jnp.bool_),
        sampler_logprobs=score,
        advantages=score,
        experts=experts,
    )
    several = config.train.updates_per_rollout > 1
    used: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated)
    return Minibatch(
        batch=batch,
        microbatches=used,
        anchor=score if Need.ANCHOR in needs and several else None,
        reference=score if Need.REFERENCE in needs else None,
    )


def _place(shape: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _memory(found: Any, state: LearnerState, *, policy: Precision) -> Memory:
    params, optimizer = (_held(tree) for tree in (state.params, state.opt_state))
    host = float(found.host_argument_size_in_bytes)
    optimizer = max(0.0, optimizer - host)  # the host's arrays are padded
    gradients = _held(lora.trainable(state.params), dtype=policy.grads)
    copied = [x for x in jax.tree.leaves(state.params) if x.dtype != policy.compute]
    copies = _held(copied, dtype=policy.compute)
    temporary = float(found.temp_size_in_bytes)
    peak = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    peak += temporary + found.generated_code_size_in_bytes
    return Memory(
        params=params,
        optimizer=optimizer,
        host=host,
        gradients=gradients,
        copies=copies,
        # Where the compiler makes do without a whole copy, nothing is left for this.
        activations=max(0.0, temporary - gradients - copies),
        rest=max(0.0, peak - temporary - params - optimizer),
        peak=peak,
    )


def _held(tree: Any, *, dtype: DType | None = None) -> float:
    """Bytes of a tree of shapes on one device."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * (dtype or x.dtype).itemsize
            for x in jax.tree.leaves(tree)
        )
    )


def _needed(message: str) -> float | None:
    """Bytes in the compiler's complaint that a program does not fit."""
    match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds available HBM)", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    return float(match[1]) * GIB * 1024.0 ** ("KMGT".index(match[2]) - 2)
