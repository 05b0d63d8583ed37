"""Entry point that vLLM loads in each of its processes."""

import contextlib
import time

BACKEND = "jaxrl"
_NAP = 1e-4  # seconds; a step of the smallest model takes twenty times as long


def register() -> None:
    """Registers the bridge as a weight-transfer backend; the engine is imported on first use."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    with contextlib.suppress(ValueError):  # vLLM may load a plugin twice
        WeightTransferEngineFactory.register_engine(
            BACKEND, "jaxrl.bridge.in_vllm.engine", "BridgeEngine"
        )
    if current_platform.is_cpu():
        _nap_while_waiting()


def _nap_while_waiting() -> None:
    """Makes vLLM's engine and worker sleep while they wait for each other.

    They would spin, also for a second after each message, on cores that the learner needs.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(_NAP)
