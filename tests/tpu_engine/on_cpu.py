"""vLLM's TPU engine on jax's CPU backend: what tpu-inference 0.32 needs there.

A plugin of pytest (`-p tests.tpu_engine.on_cpu`), so that it comes before everything else. As a
program it runs a command of jaxrl: `.venv-vllm-tpu/bin/python -m tests.tpu_engine.on_cpu train ...`
"""

import os
import sys
from pathlib import Path
from typing import Any

_DEVICES = 4
_CACHE = Path(__file__).parents[2] / ".cache" / "compiled" / "tpu_engine"


def install() -> None:
    """Prepares this process; the engine's own files are used as they are."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        SKIP_JAX_PRECOMPILE="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        PJRT_NPROC="64",  # see tests/conftest.py
        JAX_COMPILATION_CACHE_DIR=str(_CACHE),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        # Otherwise it asks the cloud's metadata server which TPU this is.
        TPU_ACCELERATOR_TYPE="v6e-1",
        TPU_NAME="none",
        TPU_WORKER_ID="0",
        TPU_SKIP_MDS_QUERY="1",
        SC_ALLREDUCE_ALLGATHER_OFFLOAD_MIN_BYTES="0",
    )
    import jax
    import numpy as np
    from jax._src import tpu_info

    jax.config.update("jax_num_cpu_devices", _DEVICES)
    info: Any = tpu_info
    info.get_device_kind = lambda: "TPU v6 lite"  # Pallas asks which TPU it compiles for
    info.get_num_device_cores = lambda: 1

    from jaxrl.sampling import prepare_tpu_engine

    prepare_tpu_engine()

    import vllm.model_executor.models.registry as registry
    from tpu_inference import utils
    from tpu_inference.models.common import compiler_options

    registry._run_in_subprocess = lambda f: f()  # otherwise another process imports vLLM
    utils.hbm_usage_bytes = lambda devices: [(0, 1 << 30) for _ in devices]  # a CPU has no numbers
    # XLA's options for TPUs; replaced before other modules take the functions by name.
    compiler_options.get_step_fn_compiler_options = dict
    compiler_options.get_sampling_compiler_options = dict
    put = utils.general_device_put

    def put_copies(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        """Moves copies. The engine refills its host buffers in each step, and a CPU device reads
        one that starts at a multiple of 64 bytes in place: a step that still waits, as for a
        transfer between devices, would see the positions of the next step."""
        copies = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, tensor)
        return put(copies, *arguments, **keywords)

    utils.general_device_put = put_copies

    from tpu_inference.layers.common import attention_interface

    from tests.tpu_engine.attention import ragged_paged_attention

    attention_interface.ragged_paged_attention = ragged_paged_attention


install()

if __name__ == "__main__":
    from jaxrl.cli import main

    sys.exit(main())
