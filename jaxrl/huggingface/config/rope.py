"""Ropes in config.json: `rope_parameters` of transformers 5, `rope_scaling` of transformers 4."""

import dataclasses
from typing import Any

from jaxrl.huggingface.config.keys import FULL, SLIDING, ConfigJson, RopeJson
from jaxrl.huggingface.config.windows import Windows
from jaxrl.huggingface.files import excerpt
from jaxrl.models.families import DecoderConfig, Family
from jaxrl.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

_SCALINGS: dict[str, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def _keys(scaling: Any) -> dict[str, str]:
    """Returns the keys of a scaling's numbers by its fields."""
    others = {
        "original_max_positions": "original_max_position_embeddings",
        "query_beta": "llama_4_scaling_beta",
    }
    return {one.name: others.get(one.name, one.name) for one in dataclasses.fields(scaling)}


# Keys that may be absent, all of YaRN.
_OPTIONAL = [key for field, key in _keys(YarnScaling).items() if hasattr(YarnScaling, field)]
# Keys that change the angles with some rope types only.
_NUMBERS = ["factor", "low_freq_factor", "high_freq_factor", *_OPTIONAL]
# Families that do not have all rope types in transformers.
_TYPES = {"phi3": ("default",), "ministral3": ("yarn",), "gpt_oss": ("yarn",)}
Ropes = tuple[Rope | None, ...]


def read_ropes(c: ConfigJson, family: Family, windows: Windows) -> tuple[Rope, Ropes]:
    """Returns `DecoderConfig.rope` and `DecoderConfig.ropes`.

    Raises:
      ValueError: for a rope type or key that is not supported, a missing number, or tables that
        contradict each other.
    """
    given = _tables(c, family)
    read = {key: _read_table(c, table, key=key, family=family) for key, table in given.items()}
    if len(set(read.values())) > 1:
        raise ValueError("rope_parameters and rope_scaling contradict each other; delete one")
    theta = c.rope_theta if "rope_theta" in c.model_fields_set else family.theta
    rope = next(iter(read.values()), Rope(theta=theta, share=_read_share(c, None, family)))
    if c.model_type == "ministral3" and getattr(rope.scaling, "query_beta", None) is None:
        raise ValueError("rope_parameters, or llama_4_scaling_beta in it, is missing")
    if c.model_type == "gpt_oss" and not read:
        raise ValueError("rope_parameters, or rope_scaling, is missing")
    ropes: Ropes = ()
    if family.local_theta is not None:
        local = _read_local(c, theta=family.local_theta)
        ropes = tuple(rope if window is None else local for window in windows)
    if c.model_type == "smollm3":
        ropes = tuple(rope if used else None for used in _read_used(c))
    return rope, () if set(ropes) == {rope} else ropes


def _tables(c: ConfigJson, family: Family) -> dict[str, RopeJson]:
    """Returns the tables of `DecoderConfig.rope`; layers with windows may have another, see
    `_read_local`."""
    tables = {"rope_parameters": c.rope_parameters, "rope_scaling": c.rope_scaling}
    if family.local_theta is not None and c.rope_parameters is not None:
        if others := c.rope_parameters.model_fields_set - {FULL, SLIDING}:
            raise ValueError(
                f"rope_parameters.{min(others)} is not supported for {c.model_type}; expected "
                f"tables {FULL!r} and {SLIDING!r}"
            )
        del tables["rope_parameters"]
        tables[f"rope_parameters.{FULL}"] = c.rope_parameters.full_attention
    return {key: table for key, table in tables.items() if table and table.model_fields_set}


def _read_local(c: ConfigJson, *, theta: float) -> Rope:
    """Reads the rope of layers with windows, which has no scaling; `theta` is its default."""
    key = f"rope_parameters.{SLIDING}"
    outside = c.rope_local_base_freq if c.model_type == "gemma3_text" else None
    if c.rope_parameters is None:
        # transformers 5 uses `rope_theta` in layers without windows only, transformers 4 in all.
        given = "rope_theta" in c.model_fields_set
        if c.model_type == "olmo3" and given and c.rope_theta != theta:
            raise ValueError(
                f"rope_theta={c.rope_theta} without rope_parameters is not supported for olmo3; "
                f"only {theta} is"
            )
        return Rope(theta=theta if outside is None else outside)
    table = c.rope_parameters.sliding_attention or RopeJson()
    if table.model_extra or _read_kind(table, key=key) != "default":
        raise ValueError(f"{key}: only the rope type 'default' is supported")
    if table.partial_rotary_factor not in (1, None):
        raise ValueError(
            f"{key}.partial_rotary_factor={table.partial_rotary_factor} is not supported; only 1 is"
        )
    inside = table.rope_theta if "rope_theta" in table.model_fields_set else None
    if None not in (inside, outside) and inside != outside:
        raise ValueError(
            f"rope_local_base_freq={outside} and {key}.rope_theta={inside} contradict each other"
        )
    return Rope(theta=next((found for found in (inside, outside) if found is not None), theta))


def _read_used(c: ConfigJson) -> list[bool]:
    """Returns True for each layer of SmolLM3 that has a rope."""
    layers, listed = c.num_hidden_layers, c.no_rope_layers
    if listed is None:
        return [(i + 1) % c.no_rope_layer_interval != 0 for i in range(layers)]
    if len(listed) != layers or set(listed) - {0, 1}:
        raise ValueError(
            f"no_rope_layers={excerpt(listed)}: expected {layers} entries, 1 for a layer with rope "
            "and 0 for one without"
        )
    return [used == 1 for used in listed]


def _read_kind(table: RopeJson, *, key: str) -> str:
    """Returns a table's rope type, "default" if it names none.

    Raises:
      ValueError: for a type that is null, two types, or a number that the type does not use.
    """
    given = [name for name in ("rope_type", "type") if name in table.model_fields_set]
    kinds = {getattr(table, name) for name in given} or {"default"}
    kind = kinds.pop()
    if kinds:
        raise ValueError(
            f"{key}: rope_type={table.rope_type!r} and type={table.type!r} contradict each other; "
            "delete one"
        )
    if kind is None:
        raise ValueError(f"{key}.{given[0]} is null; expected a rope type, or no {key}")
    used = _keys(_SCALINGS[kind]).values() if kind in _SCALINGS else ()
    unused = [name for name in _NUMBERS if name not in used and getattr(table, name) is not None]
    if unused and (kind == "default" or kind in _SCALINGS):
        raise ValueError(f"{key}.{unused[0]} is not supported with the rope type {kind!r}")
    return kind


def _read_table(c: ConfigJson, table: RopeJson, *, key: str, family: Family) -> Rope:
    kind = _read_kind(table, key=key)
    for name in ("rope_theta", "original_max_position_embeddings"):
        twice = all(name in found.model_fields_set for found in (c, table))
        inside, outside = getattr(table, name), getattr(c, name)
        if twice and inside != outside and (name == "rope_theta" or kind in ("llama3", "yarn")):
            raise ValueError(f"{name}={outside} and {key}.{name}={inside} contradict each other")
    share = _read_share(c, table, family)
    if share != 1 and family.partial is None:
        raise ValueError(f"{key}.partial_rotary_factor={share} is not supported; only 1 is")
    if kind != "default" and kind not in _SCALINGS:
        raise ValueError(
            f"{key}: rope type {excerpt(kind)} is not supported; supported are 'default', "
            f"{', '.join(map(repr, _SCALINGS))}"
        )
    if kind not in (types := _TYPES.get(c.model_type, (kind,))):
        raise ValueError(f"{key}: rope type {kind!r} is not supported for {c.model_type}: {types}")
    if odd := _unknown_keys(c, table, nested="." in key):
        raise ValueError(f"{key}.{odd[0]} is not supported")
    tables = (found for found in (table, c) if "rope_theta" in found.model_fields_set)
    theta = next((found.rope_theta for found in tables), family.theta)
    if kind == "default":
        return Rope(theta=theta, share=share)
    keys = _keys(_SCALINGS[kind])
    numbers = {field: getattr(table, name) for field, name in keys.items()}
    if missing := [n for f, n in keys.items() if numbers[f] is None and n not in _OPTIONAL]:
        raise ValueError(f"{key}: rope type {kind!r} lacks {', '.join(map(repr, missing))}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ValueError(
            f"{key}: low_freq_factor={numbers['low_freq_factor']} must be less than "
            f"high_freq_factor={numbers['high_freq_factor']}"
        )
    if kind == "yarn" and theta == 1:
        raise ValueError(f"{key}: rope type 'yarn' needs a rope_theta other than 1")
    return Rope(theta=theta, scaling=_SCALINGS[kind](**numbers), share=share)


def _read_share(c: ConfigJson, table: RopeJson | None, family: Family) -> float:
    """Returns the share of rotated dimensions; 1 if the family rotates all."""
    inside = table.partial_rotary_factor if table else None
    outside = c.partial_rotary_factor
    if None not in (inside, outside) and inside != outside:
        raise ValueError(
            f"partial_rotary_factor={outside} and {inside} in rope_parameters contradict each other"
        )
    found = next((one for one in (inside, outside, family.partial) if one is not None), 1.0)
    rotated = (c.head_dim or c.hidden_size // c.num_attention_heads) * found
    if family.partial is not None and (not 0 < found <= 1 or int(rotated) % 2 or rotated < 2):
        raise ValueError(
            f"partial_rotary_factor={found}: expected a share that makes an even number of the "
            "head's dimensions"
        )
    return found


def _unknown_keys(c: ConfigJson, table: RopeJson, *, nested: bool) -> list[str]:
    """Lists keys of a table that transformers ignores, or that the family does not have."""
    # Keys about images do not matter: the three positions of a text's token are equal.
    wrapped = c.model_type.startswith("qwen3_5")
    of_images = ("mrope_section", "mrope_interleaved") if wrapped else ()
    odd = [name for name in table.model_extra or {} if name not in of_images]
    odd += [name for name in (FULL, SLIDING) if getattr(table, name) is not None]
    if table.truncate is not None and nested:  # transformers looks for it one table higher
        odd.append("truncate")
    if c.model_type != "ministral3" and table.llama_4_scaling_beta is not None:
        odd.append("llama_4_scaling_beta")
    if table.max_position_embeddings not in (None, c.max_position_embeddings):
        odd.append("max_position_embeddings")
    return odd


def write_ropes(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Builds the keys that `read_ropes` reads."""
    rope = config.rope
    scaling, theta = _write_scaling(rope), {"rope_theta": rope.theta}
    if family.partial is not None:
        theta |= {"partial_rotary_factor": rope.share}
    content: dict[str, Any] = {
        # transformers 5 and 4 use different keys; each ignores the other's.
        "rope_parameters": theta | scaling,
        **theta,
        "rope_scaling": scaling if rope.scaling else None,
    }
    if family.local_theta is not None:
        others = (own for own in config.ropes if own not in (None, rope))
        local = next(others, Rope(theta=rope.theta)) or rope
        inner = {"rope_theta": local.theta} | _write_scaling(local)
        content["rope_parameters"] = {FULL: theta | scaling, SLIDING: inner}
        if config.model_type == "gemma3_text":
            content["rope_local_base_freq"] = local.theta
    if config.model_type == "smollm3":
        used = config.ropes or (rope,) * config.num_layers
        content["no_rope_layers"] = [int(own is not None) for own in used]
    return content


def _write_scaling(rope: Rope) -> dict[str, Any]:
    """Builds a rope's table, without theta."""
    if rope.scaling is None:
        return {"rope_type": "default"}
    kind = next(kind for kind, make in _SCALINGS.items() if isinstance(rope.scaling, make))
    numbers = {key: getattr(rope.scaling, field) for field, key in _keys(rope.scaling).items()}
    return {"rope_type": kind} | {k: v for k, v in numbers.items() if v is not None}
