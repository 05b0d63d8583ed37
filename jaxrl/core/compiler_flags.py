"""XLA's settings for accelerators, where its own defaults cost time.

They are options of each program that `compiled.jit` compiles, so that nothing has to be set before
JAX starts. A flag that LIBTPU_INIT_ARGS or XLA_FLAGS names is left to them, and
JAXRL_COMPILER_FLAGS=0 leaves all of them out. One that this version of the compiler does not know
is left out, too. docs/results/chips.md says what each changes.
"""

import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp

SWITCH = "JAXRL_COMPILER_FLAGS"

_TPU: dict[str, bool | int] = {
    # Collectives run beside products: the weights of the next layer are gathered during this one.
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_enable_scheduler_memory_pressure_tracking": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
    "xla_tpu_scheduler_percent_shared_memory_limit": 100,
    "xla_latency_hiding_scheduler_rerun": 2,
}
_GPU: dict[str, bool | int] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    # Products of the same operand, such as queries, keys and values, stay apart: a merged one
    # writes f32 for them all, and each reader rounds it.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
_VMEM = "xla_tpu_scoped_vmem_limit_kib"  # of a TPU's fast memory that one kernel may use
# By the name of the device.
_OWN: dict[str, dict[str, bool | int]] = {
    "TPU v5 lite": {_VMEM: 50_000},
    "TPU v5": {_VMEM: 50_000},
    "TPU v6 lite": {
        _VMEM: 98_304,
        # SparseCores gather weights and add gradients while the others multiply.
        "xla_tpu_use_tc_device_shape_on_sc": True,
        "xla_sc_enable_instruction_fusion": False,
        "xla_sc_disable_megacore_partitioning": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_all_gather_offload_tracing": True,
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_enable_reduce_scatter_offload_tracing": True,
    },
}


def compiler_flags(device: Any) -> dict[str, bool | int]:
    """Returns the flags of programs for a `jax.Device`: none on CPU."""
    if os.environ.get(SWITCH) == "0":
        return {}
    flags: dict[str, bool | int] = {}
    if device.platform == "tpu":
        flags = _TPU | _OWN.get(device.device_kind, {})
    elif device.platform in ("gpu", "cuda"):
        flags = dict(_GPU)
    given = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {os.environ.get('XLA_FLAGS', '')}"
    named = {one.lstrip("-").partition("=")[0] for one in given.split()}
    wanted = {name: value for name, value in flags.items() if name not in named}
    return dict(_known(device, tuple(wanted.items()))) if wanted else {}


@functools.cache
def _known(device: Any, flags: tuple[tuple[str, bool | int], ...]) -> dict[str, bool | int]:
    """Returns the flags that the compiler for a device knows, by compiling a small program."""
    here = device.process_index == jax.process_index()
    own = jax.sharding.SingleDeviceSharding(device if here else jax.local_devices()[0])
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=own)
    kept = dict(flags)
    while kept:
        try:
            jax.jit(lambda x: x + 1, compiler_options=kept).lower(number).compile()
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or unknown[1] not in kept:
                raise
            del kept[unknown[1]]
        else:
            break
    return kept


def flags_note(device: Any) -> str | None:
    """Describes the flags for the log; None without any."""
    flags = compiler_flags(device)
    if not flags:
        return None
    text = " ".join(f"{name}={str(value).lower()}" for name, value in flags.items())
    return f"compiler flags ({SWITCH}=0 leaves them out): {text}"
