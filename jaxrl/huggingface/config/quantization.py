"""The format of quantised weights that a config.json names."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxrl.huggingface.files import Table, validated

Block = tuple[int, int]  # rows and columns with one factor


class _Quantization(Table):
    weight_block_size: Annotated[
        list[Annotated[int, Field(ge=1, le=2**24)]], Field(min_length=2, max_length=2)
    ]
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"
    expert_dtype: Literal["fp8"] = "fp8"


class _Config(Table):
    quantization_config: _Quantization


def quant_method(raw: Mapping[str, Any]) -> Any:
    """Returns the format of quantised weights from the content of a config.json, or None."""
    quantization = raw.get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def read_block(raw: Mapping[str, Any]) -> Block | None:
    """Reads the size of blocks from the content of a config.json; None if weights are not in FP8.

    Raises:
      ValueError: for factors of whole tensors, or other settings that are not supported.
    """
    if quant_method(raw) != "fp8":
        return None
    rows, columns = validated(_Config, raw).quantization_config.weight_block_size
    return rows, columns
