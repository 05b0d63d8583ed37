"""The learner's step of a config, compiled for devices that need not exist."""

import dataclasses
import re
import time
from typing import Any

import jax

from jaxrl.commands.plan.resident import Besides, besides, on_one
from jaxrl.commands.plan.step import make_step
from jaxrl.commands.plan.topology import GIB, Topology
from jaxrl.config.training import Config
from jaxrl.core.precision import Precision
from jaxrl.learner.policy import LearnerState
from jaxrl.models import logprobs, lora
from jaxrl.models.decoder import Model
from jaxrl.models.kernels import Kernel
from sharding.collectives import Traffic, collectives
from sharding.partition import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the step on one device.

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
      besides: what a run holds besides the step.
      memory: as the program needs it, or would have.
      seconds: to trace, lower and compile.
      refused: whether the compiler made no program, because it would need too much memory.
      hlo_bytes: length of the program as text; 0 if there is none.
      traffic: what one step sends; empty if there is no program.
    """

    model: Model
    specs: Any  # of the learner's parameters: the model's, or lora.Adapted
    layout: Layout
    policy: Precision
    kernel: Kernel
    rows: int
    microbatches: int
    row_length: int
    besides: Besides
    memory: Memory
    seconds: float
    refused: bool = False
    hlo_bytes: int = 0
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)


def compile_step(config: Config, topology: Topology) -> Program:
    """Compiles the step that `jaxrl train` would run, on shapes alone.

    Of models only config.json is read, of data and reward functions nothing.

    Raises:
      FileNotFoundError, ValueError: for a model or a mesh that cannot be used, as `jaxrl train`.
      jax.errors.JaxRuntimeError: if the compiler fails for another reason than memory.
    """
    step = make_step(config, topology)
    microbatches = step.minibatch.batch.tokens.shape[0] // config.microbatch_rows
    built = {
        "model": step.model,
        "specs": step.specs,
        "layout": step.layout,
        "policy": step.policy,
        "kernel": step.kernel,
        "rows": config.microbatch_rows,
        "microbatches": microbatches,
        "row_length": config.row_length,
        "besides": besides(config, step),
    }
    start = time.perf_counter()
    function = jax.jit(
        step.learner.step, donate_argnums=0, out_shardings=(step.state_shardings, None)
    )
    try:
        compiled = function.lower(step.state, step.minibatch).compile()
    except jax.errors.JaxRuntimeError as error:
        if (needed := _needed(str(error))) is None:
            raise
        seconds = time.perf_counter() - start
        memory = _refused(needed, step.state, policy=step.policy)
        return Program(**built, memory=memory, seconds=seconds, refused=True)
    seconds = time.perf_counter() - start
    hlo = compiled.as_text() or ""
    # The number of microbatches and of chunks with scored tokens are known at run time only.
    trips = (microbatches, logprobs.position_chunks(config.row_length))
    return Program(
        **built,
        memory=_memory(compiled.memory_analysis(), step.state, policy=step.policy),
        seconds=seconds,
        hlo_bytes=len(hlo),
        traffic=collectives(hlo, trips=lambda depth: trips[min(depth, 1)]),
    )


def _memory(found: Any, state: LearnerState, *, policy: Precision) -> Memory:
    params, optimizer = (on_one(tree) for tree in (state.params, state.opt_state))
    host = float(found.host_argument_size_in_bytes)
    optimizer = max(0.0, optimizer - host)  # the host's arrays are padded
    gradients, copies = _once(state, policy)
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


def _refused(needed: float, state: LearnerState, *, policy: Precision) -> Memory:
    """Without a program: what follows from shapes, and activations as what is left."""
    placed = jax.tree.leaves(state.opt_state)
    there = [x for x in placed if x.sharding.memory_kind == "pinned_host"]
    params, host = on_one(state.params), on_one(there)
    optimizer = on_one(placed) - host
    gradients, copies = _once(state, policy)
    return Memory(
        params=params,
        optimizer=optimizer,
        host=host,
        gradients=gradients,
        copies=copies,
        activations=max(0.0, needed - params - optimizer - gradients - copies),
        rest=0.0,
        peak=needed,
    )


def _once(state: LearnerState, policy: Precision) -> tuple[float, float]:
    """Bytes of the gradients, and of the weights in `compute` where these are copies."""
    gradients = on_one(lora.trainable(state.params), dtype=policy.grads)
    copied = [x for x in jax.tree.leaves(state.params) if x.dtype != policy.compute]
    return gradients, on_one(copied, dtype=policy.compute)


def _needed(message: str) -> float | None:
    """Bytes in the compiler's complaint that a program does not fit."""
    match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds available HBM)", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    return float(match[1]) * GIB * 1024.0 ** ("KMGT".index(match[2]) - 2)
