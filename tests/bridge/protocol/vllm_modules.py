"""The engine of the bridge without vLLM, whose names it imports are replaced by simple ones."""

import contextlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

_A, _B = TypeVar("_A"), TypeVar("_B")


class _Engine(Generic[_A, _B]):
    """As vLLM's `WeightTransferEngine`, as far as the bridge uses it."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self.model, self.model_config = model, model_config


@dataclass
class _Info:
    """A request's body."""


def _nothing(*_: Any) -> None:
    """Opens or closes a model that takes weights at any time."""


def _alone() -> SimpleNamespace:
    """Returns the group of a server's only worker."""
    return SimpleNamespace(world_size=1)


_NAMES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {"ModelConfig": object},
    "vllm.distributed": {},
    "vllm.distributed.parallel_state": {"get_pp_group": _alone, "get_tp_group": _alone},
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine": _Engine,
        "WeightTransferInitInfo": _Info,
        "WeightTransferUpdateInfo": _Info,
    },
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": type("Logits", (), {})},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": type("Head", (), {})},
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.reload": {
        "initialize_layerwise_reload": _nothing,
        "finalize_layerwise_reload": _nothing,
    },
    "vllm.model_executor.model_loader.reload.layerwise": {
        "get_layerwise_info": lambda _: SimpleNamespace(loaded_weights=[], load_numel=0)
    },
    "vllm.platforms": {"current_platform": None},
}


def engine_class() -> Any:
    """Returns `BridgeEngine`; afterwards no module of vLLM is left, and the engine's neither."""
    from jaxrl.bridge import in_vllm

    name = "jaxrl.bridge.in_vllm.engine"
    modules = {key: ModuleType(key) for key in _NAMES}
    for key, values in _NAMES.items():
        vars(modules[key]).update(values)
    # Nothing else leaves again: torch, which the engine imports, cannot be loaded twice.
    kept = {key: sys.modules.pop(key) for key in (*_NAMES, name) if key in sys.modules}
    sys.modules.update(modules)
    try:
        from jaxrl.bridge.in_vllm import engine

        return engine.BridgeEngine
    finally:
        for key in (*_NAMES, name):
            sys.modules.pop(key, None)
        sys.modules.update(kept)
        with contextlib.suppress(AttributeError):
            del in_vllm.engine
