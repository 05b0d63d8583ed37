"""Ropes in config.json: `rope_parameters` of transformers 5, `rope_scaling` of transformers 4."""

from typing import Any

from jaxrl.models.checkpoint_files import shown
from jaxrl.models.config_json import ConfigJson, RopeJson
from jaxrl.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

# The scalings by rope type, with the keys of their fields; those of `_OPTIONAL` may be absent.
_SCALINGS: dict[str, tuple[Any, dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_positions",
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_max_positions",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attention_factor",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
            "truncate": "truncate",
        },
    ),
}
_OPTIONAL = (
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


def read_rope(c: ConfigJson) -> Rope:
    """Returns the rope of all layers.

    Raises:
      ValueError: for a rope type or key that is not supported, a missing number, or tables that
        contradict each other.
    """
    tables = {"rope_parameters": c.rope_parameters, "rope_scaling": c.rope_scaling}
    given = {key: table for key, table in tables.items() if table and table.model_fields_set}
    read = {key: _read_table(c, table, key=key) for key, table in given.items()}
    if len(set(read.values())) > 1:
        raise ValueError("rope_parameters and rope_scaling contradict each other; delete one")
    return next(iter(read.values()), Rope(theta=c.rope_theta))


def _read_table(c: ConfigJson, table: RopeJson, *, key: str) -> Rope:
    kind = table.rope_type or table.type or "default"
    for name in ("rope_theta", "original_max_position_embeddings"):
        twice = all(name in found.model_fields_set for found in (c, table))
        inside, outside = getattr(table, name), getattr(c, name)
        if twice and inside != outside and (name == "rope_theta" or kind in ("llama3", "yarn")):
            raise ValueError(f"{name}={outside} and {key}.{name}={inside} contradict each other")
    if table.partial_rotary_factor not in (1, None):
        raise ValueError(
            f"{key}.partial_rotary_factor={table.partial_rotary_factor} is not supported; only 1 is"
        )
    if kind != "default" and kind not in _SCALINGS:
        raise ValueError(
            f"{key}: rope type {shown(kind)} is not supported; supported are 'default', "
            f"{', '.join(map(repr, _SCALINGS))}"
        )
    if table.model_extra:  # also tables nested by layer type, which transformers 5 writes
        raise ValueError(f"{key}.{next(iter(table.model_extra))} is not supported")
    make, fields = _SCALINGS.get(kind, (None, {}))
    for name in _OPTIONAL:
        if name not in fields and getattr(table, name) is not None:
            raise ValueError(f"{key}.{name} is not supported with the rope type {kind!r}")
    theta = table.rope_theta if "rope_theta" in table.model_fields_set else c.rope_theta
    if make is None:
        return Rope(theta=theta)
    numbers = {field: getattr(table, name) for name, field in fields.items()}
    if missing := [n for n, f in fields.items() if numbers[f] is None and n not in _OPTIONAL]:
        raise ValueError(f"{key}: rope type {kind!r} lacks {', '.join(map(repr, missing))}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ValueError(
            f"{key}: low_freq_factor={numbers['low_freq_factor']} must be less than "
            f"high_freq_factor={numbers['high_freq_factor']}"
        )
    if kind == "yarn" and theta == 1:
        raise ValueError(f"{key}: rope type 'yarn' needs a rope_theta other than 1")
    return Rope(theta=theta, scaling=make(**numbers))


def write_rope(rope: Rope) -> dict[str, Any]:
    """Builds the table of a rope without its theta."""
    for kind, (make, fields) in _SCALINGS.items():
        if isinstance(rope.scaling, make):
            numbers = {name: getattr(rope.scaling, field) for name, field in fields.items()}
            return {"rope_type": kind} | {k: v for k, v in numbers.items() if v is not None}
    return {"rope_type": "default"}
