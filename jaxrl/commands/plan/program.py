"""The learner's step, compiled for devices that need not exist."""

import dataclasses
import time
from typing import Any

import jax

from jaxrl.commands.plan.chips import TPUS
from jaxrl.commands.plan.decoding import Decoding, needed_memory, plan_decoding
from jaxrl.commands.plan.kernels import kernel_seconds
from jaxrl.commands.plan.resident import ResidentMemory, on_one, resident_memory
from jaxrl.commands.plan.step import PlannedStep, make_step
from jaxrl.commands.plan.topology import Topology
from jaxrl.config.training import Config
from jaxrl.core import jit
from jaxrl.models import lora
from jaxrl.sharding import Traffic, Work, collectives, program_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the step on one device, in bytes."""

    params: float  # master weights
    optimizer: float  # optimizer state on the device
    host: float  # optimizer state in host memory
    gradients: float  # gradients accumulated over microbatches; temporary
    copies: float  # weights in `compute`, if they are not the master weights; temporary
    activations: float  # all other temporaries
    rest: float  # batch, metrics and the program itself
    peak: float  # sum of all but `host`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled step."""

    step: PlannedStep
    rows: int  # rows of one microbatch, over all devices
    microbatches: int  # largest number of microbatches in an optimizer step
    row_length: int  # tokens in a row
    resident: ResidentMemory
    memory: Memory
    seconds: float  # time to trace, lower and compile
    rejected: bool = False  # the compiler ran out of memory, so there is no program
    hlo_bytes: int = 0  # length of the program as text; 0 without a program
    decoding: Decoding | None = None  # of the embedded sampler; None if others sample
    # Sent by one step; empty without a program.
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    work: tuple[Work, ...] = ()  # of each instruction; empty without a program
    kernels: float = 0.0  # seconds of a TPU's Pallas kernels, which its compiler does not estimate


def compile_step(config: Config, topology: Topology) -> Program:
    """Compiles the step that `jaxrl train` would run, from shapes and the model's config.json.

    Raises:
      FileNotFoundError, ValueError: for an unusable model or mesh, like `jaxrl train`.
      ModuleNotFoundError: if the compiler needs cuDNN and does not find it.
      jax.errors.JaxRuntimeError: if the compiler fails for a reason other than memory.
    """
    step = make_step(config, topology)
    config = step.config
    resident, decoding = resident_memory(step), None
    if resident.cache is not None:
        decoding = plan_decoding(step, resident.cache, topology=topology)
        held = dataclasses.replace(resident.cache, decoding=decoding.temporary or 0.0)
        resident = dataclasses.replace(resident, cache=held)
    built = {
        "step": step,
        "rows": config.microbatch_rows,
        "microbatches": step.microbatches,
        "row_length": config.row_length,
        "resident": resident,
        "decoding": decoding,
    }
    start = time.perf_counter()
    function = jit(
        step.learner.step,
        sums=config.precision.sums,
        device=step.layout.mesh.devices.flat[0],
        donate_argnums=0,
        keep_unused=True,  # the devices hold the whole minibatch
        out_shardings=(step.state_shardings, None),
    )
    try:
        compiled = topology.compile(function.lower(step.state, step.minibatch))
    except RuntimeError as error:
        if "cuDNN" in str(error):
            raise ModuleNotFoundError(
                f"attention by cudnn cannot be compiled: {str(error).rstrip('.')}; pip install "
                f"nvidia-cudnn-cu12 jax-cuda12-plugin=={jax.__version__}, or set "
                "train.attention = 'xla'"
            ) from None
        if (needed := needed_memory(str(error))) is None:
            raise
        seconds = time.perf_counter() - start
        placed = jax.tree.leaves(step.state.opt_state)
        host = on_one([x for x in placed if x.sharding.memory_kind == "pinned_host"])
        memory = _memory(step, peak=needed, host=host)
        return Program(**built, memory=memory, seconds=seconds, rejected=True)
    seconds = time.perf_counter() - start
    hlo = compiled.as_text() or ""
    work = tuple(program_work(hlo, trips=step.trips))
    kind = topology.name.partition(":")[0]
    kernels = sum(kernel_seconds(one, kind=kind) for one in work) if kind in TPUS else 0.0
    found: Any = compiled.memory_analysis()
    peak = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    peak += found.temp_size_in_bytes + found.generated_code_size_in_bytes
    return Program(
        **built,
        memory=_memory(
            step,
            peak=peak,
            host=float(found.host_argument_size_in_bytes),
            temporary=float(found.temp_size_in_bytes),
        ),
        seconds=seconds,
        hlo_bytes=len(hlo),
        traffic=collectives(hlo, trips=step.trips),
        work=work,
        kernels=kernels,
    )


def _memory(
    step: PlannedStep, *, peak: float, host: float, temporary: float | None = None
) -> Memory:
    """Divides the peak by kind from shapes; without a program all but the state is temporary."""
    state, precision = step.state, step.config.precision
    params = on_one(state.params)
    optimizer = max(0.0, on_one(state.opt_state) - host)  # host arrays are padded
    gradients = on_one(lora.trainable(state.params), dtype=precision.grads)
    copied = [x for x in jax.tree.leaves(state.params) if x.dtype != precision.compute]
    copies = on_one(copied, dtype=precision.compute)
    temporary = peak - params - optimizer if temporary is None else temporary
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
