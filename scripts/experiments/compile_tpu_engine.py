"""Compiles the step of vLLM's TPU engine for TPUs that need not exist; prints a chip's memory.

    python scripts/experiments/compile_tpu_engine.py configs/models/qwen3_8b v6e 4

It runs in .venv-vllm-tpu. Further options: --sequences and --length size the KV cache, and
each of --tokens is a step with as many tokens, of all sequences together. The engine's model and
its attention kernel are used as they are, in bf16; the head, which is a program of its own, is not
among the arguments.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple


class Chip(NamedTuple):
    """A generation of TPUs."""

    name: str
    cores: int
    version: int
    topologies: dict[int, str]  # by number of chips


CHIPS = {
    "v6e": Chip("TPU v6 lite", 1, 6, {4: "2x2", 8: "2x4"}),
    "v5p": Chip("TPU v5", 2, 5, {4: "2x2x1", 8: "2x2x2"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory with config.json")
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("shards", type=int, choices=(4, 8), help="chips that share each matrix")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64])
    arguments = parser.parse_args()
    prepare(arguments.chip, shards=arguments.shards)
    step, shapes = engine_step(arguments)
    for tokens in arguments.tokens:
        begun = time.monotonic()
        memory = step(*shapes(tokens)).compile().memory_analysis()
        numbers = {
            "arguments": memory.argument_size_in_bytes,
            "of them the cache, written in place": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        }
        shown = ", ".join(f"{name} {size / 2**30:.3f} GiB" for name, size in numbers.items())
        seconds = time.monotonic() - begun
        print(f"{arguments.chip}, {tokens} tokens: {shown}; {seconds:.0f} s", flush=True)


def prepare(kind: str, *, shards: int) -> None:
    """Makes jax and the engine take this machine for a host with TPUs."""
    chip = CHIPS[kind]
    os.environ.update(
        JAX_PLATFORMS="cpu",
        HF_HUB_OFFLINE="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE=f"{kind}-{shards}",
        TPU_NAME="none",
        TPU_WORKER_ID="0",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_SKIP_MDS_QUERY="1",
        SC_ALLREDUCE_ALLGATHER_OFFLOAD_MIN_BYTES="0",
    )
    import jax
    from jax._src import tpu_info

    jax.config.update("jax_num_cpu_devices", shards)
    info: Any = tpu_info
    info.get_device_kind = lambda: chip.name
    info.get_num_device_cores = lambda: chip.cores

    from jaxrl.sampling import prepare_tpu_engine

    prepare_tpu_engine()
    import vllm.model_executor.models.registry as registry
    from tpu_inference import utils
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, util
    from tpu_inference.layers.jax import pp_utils
    from tpu_inference.models.jax import llama3, qwen2, qwen3

    registry._run_in_subprocess = lambda f: f()  # otherwise another process imports vLLM
    utils.hbm_usage_bytes = lambda devices: [(0, 1 << 30) for _ in devices]
    util.get_tpu_version = kernel.get_tpu_version = lambda: chip.version
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
    for module in (pp_utils, llama3, qwen2, qwen3):
        module.get_pp_group = lambda: alone


def engine_step(arguments: argparse.Namespace) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the function that lowers the engine's step, and the one from a number of tokens to
    the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import vllm
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tpu_inference.models.common import compiler_options, model_loader

    shards, chip = arguments.shards, CHIPS[arguments.chip]
    strategy = {"device_indexes": list(range(shards))}
    config = vllm.EngineArgs(
        model=arguments.model,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=arguments.length,
        max_num_seqs=arguments.sequences,
        tensor_parallel_size=shards,
        skip_tokenizer_init=True,
        additional_config={"sharding": {"sharding_strategy": strategy}},
    ).create_engine_config()
    config.model_config.dtype = jnp.dtype("bfloat16")
    config.quant_config = model_loader.get_tpu_quantization_config(config)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{arguments.chip}:{chip.topologies[shards]}"
    )
    mesh = Mesh(np.array(topology.devices).reshape(1, shards), ("data", "model"))
    model_class = model_loader._get_model_architecture(config.model_config.hf_config)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(
            lambda: model_class(config, jax.random.key(0), mesh), graph_updates=False
        )
    graph, state = nnx.split(model)
    leaves, form = jax.tree.flatten(state)
    found = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: x is None)
    specs = [PartitionSpec() if spec is None else spec for spec in found]
    weights = [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec())
        )
        for x, spec in zip(leaves, specs, strict=True)
    ]

    def compute(leaves: Sequence[Any], caches: list, ids: Any, metadata: Any) -> Any:
        merged = nnx.merge(graph, jax.tree.unflatten(form, leaves))
        return merged(caches, ids, metadata, None, None, (), None, None, True, True)

    def lower(caches: list, ids: Any, metadata: Any) -> Any:
        hidden = NamedSharding(mesh, PartitionSpec("data", None))
        compiled = jax.jit(
            compute,
            donate_argnums=1,
            out_shardings=([one.sharding for one in caches], hidden, hidden, None),
            compiler_options=compiler_options.get_step_fn_compiler_options(),
        )
        with jax.set_mesh(mesh):
            return compiled.lower(weights, caches, ids, metadata)

    return lower, lambda tokens: _inputs(config, mesh, arguments=arguments, tokens=tokens)


def _inputs(config: Any, mesh: Any, *, arguments: argparse.Namespace, tokens: int) -> tuple:
    """Returns the shapes of a step's caches, token ids and metadata."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from tpu_inference.layers.common.attention_metadata import AttentionMetadata
    from tpu_inference.runner import kv_cache

    def shape(dims: tuple[int, ...], *spec: str | None, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    sizes, page = config.model_config.hf_config, config.cache_config.block_size
    sequences, pages = arguments.sequences, -(-arguments.length // page)
    cache = kv_cache.get_kv_cache_shape_with_mesh(
        mesh, sequences * pages + 1, page, sizes.num_key_value_heads, sizes.head_dim, jnp.bfloat16
    )
    caches = [
        shape(cache, "data", None, "model", dtype=jnp.bfloat16)
        for _ in range(sizes.num_hidden_layers)
    ]
    metadata = AttentionMetadata(
        input_positions=shape((tokens,), "data"),
        block_tables=shape((sequences * pages,), "data"),
        seq_lens=shape((sequences,), "data"),
        query_start_loc=shape((sequences + 1,)),
        request_distribution=shape((3,)),
        padded_num_reqs=sequences,
    )
    return caches, shape((tokens,), "data"), metadata


if __name__ == "__main__":
    main()
