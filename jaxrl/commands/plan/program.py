"""The learner's step, compiled for devices that need not exist."""

import dataclasses
import re
import time
from typing import Any

import jax

from jaxrl.commands.plan.resident import ResidentMemory, on_one, resident_memory
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
    """Memory of the step on one device, in bytes.

    Attributes:
      params: master weights.
      optimizer: optimizer state on the device.
      host: optimizer state in host memory.
      gradients: gradients accumulated over microbatches; temporary.
      copies: weights in `compute`, if they are not the master weights; temporary.
      activations: all other temporaries.
      rest: batch, metrics and the program itself.
      peak: sum of all but `host`.
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
      model: the model, without weights.
      specs: specs of the learner's parameters: the model's, or lora.Adapted.
      layout: the mesh and its rules.
      policy: the dtypes.
      kernel: the attention implementation.
      rows: rows of one microbatch, over all devices.
      microbatches: largest number of microbatches in an optimizer step.
      row_length: tokens in a row.
      resident: memory held outside the step.
      memory: memory of the step.
      seconds: time to trace, lower and compile.
      rejected: the compiler ran out of memory, so there is no program.
      hlo_bytes: length of the program as text; 0 without a program.
      traffic: data sent by one step; empty without a program.
    """

    model: Model
    specs: Any
    layout: Layout
    policy: Precision
    kernel: Kernel
    rows: int
    microbatches: int
    row_length: int
    resident: ResidentMemory
    memory: Memory
    seconds: float
    rejected: bool = False
    hlo_bytes: int = 0
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)


def compile_step(config: Config, topology: Topology) -> Program:
    """Compiles the step that `jaxrl train` would run, from shapes alone.

    It reads the model's config.json, and neither data nor reward functions.

    Raises:
      FileNotFoundError, ValueError: for an unusable model or mesh, like `jaxrl train`.
      jax.errors.JaxRuntimeError: if the compiler fails for a reason other than memory.
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
        "resident": resident_memory(config, step),
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
        memory = _memory_if_rejected(needed, step.state, policy=step.policy)
        return Program(**built, memory=memory, seconds=seconds, rejected=True)
    seconds = time.perf_counter() - start
    hlo = compiled.as_text() or ""
    # The numbers of microbatches and of chunks with scored tokens are known only at run time.
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
    optimizer = max(0.0, optimizer - host)  # host arrays are padded
    gradients, copies = _temporary_copies(state, policy)
    temporary = float(found.temp_size_in_bytes)
    peak = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    peak += temporary + found.generated_code_size_in_bytes
    return Memory(
        params=params,
        optimizer=optimizer,
        host=host,
        gradients=gradients,
        copies=copies,
        # Negative if the compiler avoids a full copy.
        activations=max(0.0, temporary - gradients - copies),
        rest=max(0.0, peak - temporary - params - optimizer),
        peak=peak,
    )


def _memory_if_rejected(needed: float, state: LearnerState, *, policy: Precision) -> Memory:
    """Derives memory from shapes; activations are the rest of `needed`."""
    placed = jax.tree.leaves(state.opt_state)
    in_host = [x for x in placed if x.sharding.memory_kind == "pinned_host"]
    params, host = on_one(state.params), on_one(in_host)
    optimizer = on_one(placed) - host
    gradients, copies = _temporary_copies(state, policy)
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


def _temporary_copies(state: LearnerState, policy: Precision) -> tuple[float, float]:
    """Counts the bytes of the gradients, and of weights copied to `compute`."""
    gradients = on_one(lora.trainable(state.params), dtype=policy.grads)
    copied = [x for x in jax.tree.leaves(state.params) if x.dtype != policy.compute]
    return gradients, on_one(copied, dtype=policy.compute)


def _needed(message: str) -> float | None:
    """Parses the needed bytes from the compiler's out-of-memory error."""
    match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds available HBM)", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    return float(match[1]) * GIB * 1024.0 ** ("KMGT".index(match[2]) - 2)
