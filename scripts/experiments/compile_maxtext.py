"""Compiles MaxText's training step for absent TPUs; says where its time and bytes go.

python scripts/experiments/compile_maxtext.py v6e-8 qwen3-8b [KEY=VALUE ...] --rows 2 [--hlo FILE]

The step is MaxText's own, with its defaults and full rematerialisation, of synthetic rows of 4,096
tokens; KEY=VALUE sets any of its options. It is read as `scripts/bench_chips.py` reads jaxrl's.
Needs `pip install 'maxtext[tpu]==0.2.5' lazy_loader` on Python 3.12, and this repository on
PYTHONPATH. v6e-8 and v5p-16 are MaxText's names of eight chips.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8"}
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
sys.path.append(str(Path(__file__).parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("topology", help="MaxText's name, e.g. v6e-8")
    parser.add_argument("model", help="MaxText's name, e.g. qwen3-8b")
    parser.add_argument("--rows", type=int, default=1, help="rows of 4,096 tokens on each device")
    parser.add_argument("--hlo", type=Path, help="keep the compiled program as text")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="of MaxText")
    given = parser.parse_args()
    compiled, config = _compiled(given)

    from benchmarks import chips

    text = compiled.as_text()
    if given.hlo:
        given.hlo.write_text(text, encoding="utf-8")
    found = chips.by_cause(
        text,
        chip=given.topology.partition("-")[0],
        trips=(config.gradient_accumulation_steps,),
        heads=(config.num_query_heads, config.num_kv_heads),
        head_dim=config.head_dim,
        head="logits|cross_entropy",
    )
    for line in chips.report(found, text, trips=(config.gradient_accumulation_steps,)):
        print(line)
    print(f"temporaries {compiled.memory_analysis().temp_size_in_bytes / 2**30:32.2f} GiB")


def _compiled(given: argparse.Namespace) -> tuple[Any, Any]:
    """Compiles the step as MaxText's train_compile does; returns it and MaxText's config."""
    import jax
    import maxtext
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    keys = {
        "compile_topology": given.topology,
        "compile_topology_num_slices": 1,
        "model_name": given.model,
        "per_device_batch_size": given.rows,
        "max_target_length": 4096,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "run_name": "compiled",
        "base_output_directory": "compiled",
        "remat_policy": "full",
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    written = [f"{key}={value}" for key, value in keys.items()]
    config = pyconfig.initialize(["", str(base), *written, *given.options])
    mesh = train_compile.get_topology_mesh(config)
    args, kwargs, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    inputs = sharding.build_zero1_input_state_mesh_shardings(config, state, params)
    data = sharding.get_input_data_sharding(config, mesh)
    function, places, results, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data, inputs, model, config, params
    )
    compiled = train_compile.jit_and_compile(
        function,
        args,
        kwargs,
        mesh,
        places,
        results,
        static,
        donated,
        config,
        train_compile.axis_rules(config.logical_axis_rules),
    )
    return compiled, config


if __name__ == "__main__":
    main()
