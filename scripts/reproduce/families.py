"""The sanity test for other models: a Llama, a mixture of experts, and adapters. The sampler is the
embedded one or a vLLM server."""

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


class Case(NamedTuple):
    """A base model, and the keys of its runs."""

    model: dict
    keys: Mapping[str, object] = {}


CASES = {
    "llama": Case(make_arithmetic.MODEL | {"model_type": "llama"}),
    "qwen3_moe, 2 of 8 experts": Case(make_arithmetic.MODEL | EXPERTS),
    # Adapters take larger learning rates than whole models.
    "qwen3, adapters of rank 8": Case(
        make_arithmetic.MODEL, {"lora.rank": 8, "optimizer.learning_rate": 3e-3}
    ),
}
PRECISIONS = {"bf16": "bf16_master", "fp16": "fp16_master"}
PARTS = {"families": "embedded", "served_families": "vllm"}  # of the script, with their samplers
Cell = tuple[str, str, str]  # case, sampler, dtype of training and sampler
CELLS: list[Cell] = [(c, s, d) for c in CASES for s in PARTS.values() for d in PRECISIONS]


def run_cell(directory: Path, cell: Cell, *, seed: int) -> None:
    """Trains one run, after its base model."""
    (name, sampler, dtype), case = cell, CASES[cell[0]]
    material = directory / _named(name)
    sanity.write_material(material, model=case.model)
    keys = {
        "seed": seed,
        "run_dir": material / f"{sampler}-{dtype}-{seed}",
        "model.path": material / "base" / "model",
        "data.path": material / "perfectible.jsonl",
        "precision": PRECISIONS[dtype],
        "sampler.name": sampler,
    }
    trained(sanity.CONFIG, keys | dict(case.keys))


def found_cells(directory: Path) -> dict[Cell, list[Entries]]:
    """Reads the finished runs, sorted by seed."""
    return found(directory, {(c, s, d): f"{_named(c)}/{s}-{d}-[0-9]*" for c, s, d in CELLS})


def table(results: Mapping[Cell, Sequence[Entries]]) -> str:
    """Formats a line for each cell, over its seeds."""
    heads = ("model", "sampler", "training and sampler")
    return markdown(
        [dict(zip(heads, cell, strict=True)) | sanity.columns(r) for cell, r in results.items()]
    )


def _named(case: str) -> str:
    return case.replace(",", "").replace(" ", "-")
