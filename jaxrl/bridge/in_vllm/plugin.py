"""The entry point that vLLM loads in each of its processes."""

# pyright: reportMissingImports=false

import contextlib

BACKEND = "jaxrl"


def register() -> None:
    """Offers the bridge as a weight-transfer backend; the engine is imported when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # vLLM may load a plugin twice
        WeightTransferEngineFactory.register_engine(
            BACKEND, "jaxrl.bridge.in_vllm.engine", "BridgeEngine"
        )
