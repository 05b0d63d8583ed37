"""vLLM's quantization method for a learner with `blocks=int8`; runs inside vLLM.

Every process of vLLM imports it, so it imports no layers before a model is built.
"""

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from jaxrl.bridge.base import INT8


@register_quantization_config(INT8)
class Int8Config(QuantizationConfig):
    """Settings of the method: there are none."""

    @classmethod
    def get_name(cls) -> Any:
        """Returns the method's name."""
        return INT8

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Lists the dtypes of activations."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns the oldest GPU that has the method; a CPU is not asked."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Lists files with settings."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int8Config":
        """Builds the settings."""
        del config
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Returns the method of a layer; None for embeddings, heads and attention."""
        from vllm.model_executor.layers.linear import LinearBase

        from jaxrl.bridge.in_vllm.int8 import Int8LinearMethod

        del prefix
        return Int8LinearMethod() if isinstance(layer, LinearBase) else None
