"""The settings of a vLLM server that its arithmetic depends on."""

from collections.abc import Mapping
from typing import Any

# Of the tables of vLLM's configuration. Sizes and limits are not among them: they differ from run
# to run, and decide what is computed together but not how.
_SETTINGS = {
    "model_config": ("dtype", "hf_overrides", "quantization", "enforce_eager", "model_impl"),
    "cache_config": ("cache_dtype", "enable_prefix_caching"),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "enable_expert_parallel",
    ),
    "scheduler_config": ("enable_chunked_prefill",),
    "attention_config": ("backend", "flash_attn_version"),
    "kernel_config": ("moe_backend", "linear_backend"),
    "compilation_config": ("mode", "cudagraph_mode", "custom_ops"),
}
_ENVIRONMENT = ("VLLM_BATCH_INVARIANT", "VLLM_CPU_ATTN_SPLIT_KV")


def of_server(info: Mapping[str, Any]) -> dict[str, str]:
    """Selects from the answer of vLLM's /server_info, in JSON, as texts by name."""
    config, environment = info.get("vllm_config", {}), info.get("vllm_env", {})
    found = {
        f"{table}.{name}": config[table][name]
        for table, names in _SETTINGS.items()
        for name in names
        if name in (config.get(table) or {})
    }
    found |= {name: environment[name] for name in _ENVIRONMENT if name in environment}
    found["speculative_config"] = config.get("speculative_config")
    return {name: str(value) for name, value in found.items()}
