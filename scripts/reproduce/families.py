"""The sanity test for other models: a Llama, a mixture of experts, adapters, and a dense model of
6.3 million parameters. The sampler is the embedded one or a vLLM server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import make_arithmetic
from experiments.runs import markdown, trained
from reproduce import sanity
from reproduce.grid import Entries, found

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
LARGE = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "initializer_range": 0.05,
}


class Case(NamedTuple):
    """A base model, further arguments of its fine-tuning, and the keys of its runs."""

    model: dict
    sft: Sequence[str] = ()
    keys: Mapping[str, object] = {}


CASES = {
    "llama": Case(make_arithmetic.MODEL | {"model_type": "llama"}),
    "qwen3_moe, 2 of 8 experts": Case(make_arithmetic.MODEL | EXPERTS),
    # Adapters take larger learning rates than whole models.
    "qwen3, adapters of rank 8": Case(
        make_arithmetic.MODEL, keys={"lora.rank": 8, "optimizer.learning_rate": 3e-3}
    ),
    "qwen3, 8 layers of 256": Case(
        make_arithmetic.MODEL | LARGE,
        sft=("--precision=bf16_master", "--train.steps=400", "--optimizer.learning_rate=1e-3"),
        keys={"optimizer.learning_rate": 1e-4},
    ),
}
PRECISIONS = {"bf16": "bf16_master", "fp16": "fp16_master"}
PARTS = {"families": "embedded", "served_families": "vllm"}  # of the script, with their samplers
Cell = tuple[str, str, str]  # case, sampler, dtype of training and sampler
CELLS: list[Cell] = [(c, s, d) for c in CASES for s in PARTS.values() for d in PRECISIONS]


def run_cell(directory: Path, cell: Cell, *, seed: int) -> None:
    """Trains one run, after its base model."""
    name, sampler, dtype = cell
    run_dir = material(directory, name) / f"{sampler}-{dtype}-{seed}"
    own = keys(directory, name, dtype=dtype, seed=seed)
    trained(sanity.CONFIG, own | {"run_dir": run_dir, "sampler.name": sampler})


def material(directory: Path, name: str) -> Path:
    """Returns the directory of a case, with its base model and prompts; writes them first if they
    are not there."""
    there, case = directory / material_name(name), CASES[name]
    sanity.write_material(there, model=case.model, sft=case.sft)
    return there


def keys(directory: Path, name: str, *, dtype: str, seed: int) -> dict[str, object]:
    """Returns the keys that all runs of a case in a dtype and a seed have."""
    there = material(directory, name)
    own = {
        "seed": seed,
        "model.path": there / "base" / "model",
        "data.path": there / "perfectible.jsonl",
        "precision": PRECISIONS[dtype],
    }
    return own | dict(CASES[name].keys)


def found_cells(directory: Path) -> dict[Cell, list[Entries]]:
    """Reads the finished runs, sorted by seed."""
    return found(directory, {(c, s, d): f"{material_name(c)}/{s}-{d}-[0-9]*" for c, s, d in CELLS})


def table(results: Mapping[Cell, Sequence[Entries]]) -> str:
    """Formats a line for each cell, over its seeds."""
    heads = ("model", "sampler", "training and sampler")
    return markdown(
        [dict(zip(heads, cell, strict=True)) | sanity.columns(r) for cell, r in results.items()]
    )


def material_name(case: str) -> str:
    """Returns the name of a case's directory."""
    return case.replace(",", "").replace(" ", "-")
