"""What docs/scale.md shows: models on topologies where they fit, and one model on more chips."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GIB = 2**30
LENGTH = 4096  # tokens of a row in configs/qwen3_8b.toml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A run of configs/qwen3_8b.toml with changes.

    Attributes:
      model: a directory under configs/models.
      topology: see `jaxrl plan`.
      mesh: axis -> size.
      precision: a policy.
    """

    model: str
    topology: str
    mesh: Mapping[str, int]
    precision: str = "bf16_master"

    @property
    def name(self) -> str:
        """As results name the row."""
        return f"{self.model} {self.topology} {self.precision}"

    def keys(self) -> Iterator[tuple[str, str]]:
        """Changes to the config, as on a command line: two microbatches of a row on every shard."""
        for axis, size in self.mesh.items():
            yield f"mesh.{axis}", str(size)
        yield "model.path", f"configs/models/{self.model}"
        yield "precision", self.precision
        shards = math.prod(size for axis, size in self.mesh.items() if axis != "tensor")
        yield "train.train_batch", str(2 * shards // 8)


_SCALED, _OTHER_SIZES = "qwen3_8b", (("v5p:2x2x4", 16), ("v5p:4x8x8", 256), ("v5p:8x8x8", 512))
_MODELS = (
    ("qwen3_0_6b", "v5e:2x4", {"fsdp": 8}),
    (_SCALED, "v5p:4x4x4", {"fsdp": 64}),
    ("qwen3_14b", "v5p:4x4x4", {"fsdp": 64}),
    ("qwen3_30b_a3b", "v5p:4x4x4", {"fsdp": 8, "expert": 8}),
    ("llama3_70b", "v5p:4x4x8", {"fsdp": 64, "tensor": 2}),
)
ROWS = [
    *(
        Row(model=model, topology=topology, mesh=mesh, precision=precision)
        for precision in ("bf16_master", "fp16_master")
        for model, topology, mesh in _MODELS
    ),
    *(Row(model=_SCALED, topology=name, mesh={"fsdp": chips}) for name, chips in _OTHER_SIZES),
]


def tables(results: Sequence[Mapping[str, Any]]) -> str:
    """Both tables as Markdown, and which rows of each are missing."""
    found = {row["name"]: row for row in results}
    sizes = sorted(
        (row for row in ROWS if row.model == _SCALED and row.precision == "bf16_master"),
        key=lambda row: math.prod(row.mesh.values()),
    )
    models = ROWS[: -len(_OTHER_SIZES)]
    first = _table("Models on chips where they fit", _MODEL_CELLS, rows=models, found=found)
    head = f"{_SCALED} in bf16_master on 16 to 512 chips"
    return "\n".join([*first, *_table(head, _SIZE_CELLS, rows=sizes, found=found)])


def _table(
    head: str, cells: Mapping[str, Any], *, rows: Sequence[Row], found: Mapping[str, Any]
) -> Iterator[str]:
    yield f"#### {head}\n"
    yield f"| {' | '.join(cells)} |"
    yield "|" + " --- |" * len(cells)
    for row in rows:
        if row.name in found:
            one = found[row.name]
            yield f"| {' | '.join(cell(one) for cell in cells.values())} |"
    yield ""
    if missing := [row.name for row in rows if row.name not in found]:
        yield f"Not compiled: {', '.join(missing)}.\n"


def _memory(key: str) -> Any:
    return lambda row: f"{row['memory'][key] / GIB:.2f}" if row["memory"] else ""


def _temporaries(row: Mapping[str, Any]) -> str:
    kinds = ("gradients", "copies", "activations")
    return f"{sum(row['memory'][kind] for kind in kinds) / GIB:.1f}" if row["memory"] else ""


def _run(row: Mapping[str, Any]) -> str:
    text = f"{row['run'] / GIB:.1f} of {row['of'] / GIB:.1f}"
    return text if row["fits"] else f"**{text}**"


def _sent(*kinds: str) -> Any:
    def cell(row: Mapping[str, Any]) -> str:
        found = row["traffic"]
        return f"{sum(found[kind]['sent'] for kind in kinds or found if kind in found) / GIB:.0f}"

    return cell


def _bound(key: str) -> Any:
    return lambda row: f"{row['roofline'][key]:.2f}" if row["memory"] else ""


def _mesh(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items())


_MODEL_CELLS = {
    "model": lambda row: row["model"],
    "chips": lambda row: row["topology"],
    "mesh": _mesh,
    "precision": lambda row: row["precision"],
    "attention": lambda row: row["kernel"],
    "parameters": _memory("params"),
    "optimizer": _memory("optimizer"),
    "temporaries": _temporaries,
    "peak": lambda row: f"{row['peak'] / GIB:.1f}",
    "run": _run,
    "sent": _sent(),
    "products, s": _bound("compute"),
    "links, s": _bound("links"),
    "compiled in, s": lambda row: f"{row['seconds']:.0f}",
}
_SIZE_CELLS = {
    "chips": lambda row: row["topology"],
    "parameters": _memory("params"),
    "optimizer": _memory("optimizer"),
    "temporaries": _temporaries,
    "peak": lambda row: f"{row['peak'] / GIB:.1f}",
    "run": _run,
    "all-gather": _sent("all-gather"),
    "all-reduce": _sent("all-reduce"),
    "reduce-scatter": _sent("reduce-scatter"),
    "permute": _sent("collective-permute"),
    "all": _sent(),
    "products, s": _bound("compute"),
    "links, s": _bound("links"),
}
