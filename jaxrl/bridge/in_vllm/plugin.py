"""Entry point that vLLM loads in each of its processes."""

import contextlib

BACKEND = "jaxrl"


def register() -> None:
    """Registers the bridge as a weight-transfer backend; the engine is imported on first use."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # vLLM may load a plugin twice
        WeightTransferEngineFactory.register_engine(
            BACKEND, "jaxrl.bridge.in_vllm.engine", "BridgeEngine"
        )
