"""NVIDIA GPUs to compile for that need not exist."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax


class _Device(NamedTuple):
    """Properties of a GPU that XLA's compiler asks its driver for."""

    name: str
    capability: tuple[int, int]  # compute capability
    cores: int  # streaming multiprocessors
    fpus: int  # f32 units of a core
    shared: int  # shared memory of a core in KiB; a block gets all but one
    cache: int  # L2 cache in bytes
    clock: float  # GHz
    memory: int  # bytes
    bandwidth: int  # bytes per second


_HOPPER = _Device(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fpus=128,
    shared=228,
    cache=50 * 2**20,
    clock=1.98,
    memory=84_942_979_072,
    bandwidth=3_352_320_000_000,
)
_DEVICES: Mapping[str, _Device] = {
    "a100": _Device(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        fpus=64,
        shared=164,
        cache=40 * 2**20,
        clock=1.41,
        memory=84_987_740_160,
        bandwidth=2_039_040_000_000,
    ),
    "h100": _HOPPER,
    "h200": _HOPPER._replace(
        name="NVIDIA H200", memory=150_109_880_320, bandwidth=4_800_000_000_000
    ),
    "b200": _HOPPER._replace(
        name="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        cache=126 * 2**20,
        clock=1.965,
        memory=191_514_411_008,
        bandwidth=7_672_320_000_000,
    ),
}


def gpu_devices(kind: str, *, hosts: int, each: int) -> Sequence[Any]:
    """Returns devices of `hosts` machines with `each` GPUs. They can be compiled for, not run on.

    Raises:
      ModuleNotFoundError: if jax's CUDA plugin is missing.
    """
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(name) for name in plugins
    ):
        raise ModuleNotFoundError(
            f"topology {kind!r} needs XLA's compiler for GPUs, which works without a GPU: pip "
            f"install jax-cuda12-plugin=={jax.__version__} nvidia-cudnn-cu12, or use cpu:8"
        )
    from jax.experimental import topologies

    device = _DEVICES[kind]
    _describe_to_cudnn(device.capability)
    _describe_to_pallas(device.capability)
    described = topologies.get_topology_desc(
        platform="cuda", topology=f"1x{hosts}x{each}", target_config=_target(device)
    )
    return described.devices


def _describe_to_cudnn(own: tuple[int, int]) -> None:
    """Makes jax's checks of cuDNN's attention use the described GPU's compute capability, in place
    of this machine's."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    def reaches(capability: str) -> bool:
        major, minor = capability.split(".")
        return own >= (int(major), int(minor))

    fused.check_compute_capability = reaches


def _describe_to_pallas(own: tuple[int, int]) -> None:
    """Makes Pallas, which since jax 0.11 asks for a GPU's compute capability, take the described
    GPU's for that of this machine's first device."""
    name = "jax._src.pallas.triton.gpu_info"
    if importlib.util.find_spec(name) is None:
        return
    gpu_info = importlib.import_module(name)
    major, minor = own
    info = gpu_info.GpuInfo(
        gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor
    )
    gpu_info.registry[jax.devices()[0].device_kind] = lambda: info


def _target(device: _Device) -> str:
    """Describes a GPU in the text form of XLA's GpuTargetConfigProto."""
    major, minor = device.capability
    features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152
          shared_memory_per_core: {device.shared * 1024}
          shared_memory_per_block_optin: {(device.shared - 1) * 1024}
          core_count: {device.cores} fpus_per_core: {device.fpus}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          l2_cache_size: {device.cache} clock_rate_ghz: {device.clock}
          memory_bandwidth: {device.bandwidth} device_memory_size: {device.memory}
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
        }}
        platform_name: "CUDA"
        runtime_version {{ major: 12 minor: 9 }}
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{device.name}"
    """
