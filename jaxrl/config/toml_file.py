"""Reads configs from TOML files and the command line, and writes them as TOML; every error names
its key."""

import difflib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxrl.config.replaced import replacement
from jaxrl.config.section import Section

C = TypeVar("C", bound=Section)


class ConfigError(ValueError):
    """A config that cannot be used; the message names each wrong key and the fix."""


class Key(NamedTuple):
    """A key of a config: its dotted name and its declaration."""

    name: str  # "train.steps"
    field: FieldInfo


def keys(schema: type[Section], *, prefix: str = "") -> Iterator[Key]:
    """Yields every key of a config class, in the order of declaration."""
    for name, field in schema.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from keys(section, prefix=f"{prefix}{name}.")
        else:
            yield Key(prefix + name, field)


def open_tables(schema: type[Section]) -> list[str]:
    """Returns the names of the tables that accept further keys."""
    return [
        name
        for name, field in schema.model_fields.items()
        if isinstance(section := field.annotation, type)
        and issubclass(section, Section)
        and section.model_config.get("extra") == "allow"
    ]


def load(
    schema: type[C], *, file: str | Path | None = None, overrides: Sequence[tuple[str, str]] = ()
) -> C:
    """Reads a config.

    Args:
      schema: the config class.
      file: a TOML file; only defaults and overrides when absent.
      overrides: (dotted key, text) in the order of the command line.

    Raises:
      ConfigError: for a file that is missing or not TOML, an unknown key (the message names the
        nearest one, or the key that replaced it), a missing key, a wrong type or a contradiction.
    """
    tree = _read(file) if file is not None else {}
    for name, text in overrides:
        _set(tree, name, parse_value(schema, name, text))
    return validate(schema, tree)


def validate(schema: type[C], tree: Mapping[str, Any]) -> C:
    """Makes a config from nested dicts.

    Raises:
      ConfigError: as `load`.
    """
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        lines = [line for e in error.errors() for line in _explain(schema, dict(e))]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def parse_value(schema: type[Section], name: str, text: str) -> Any:
    """Parses the value of a key on the command line.

    Strings need no quotes, lists are TOML arrays or separated by commas, anything else is TOML.

    Raises:
      ConfigError: for an unknown key, or a text that is not a TOML value.
    """
    known = {key.name: key.field.annotation for key in keys(schema)}
    if name not in known:
        if name.rpartition(".")[0] not in open_tables(schema):
            raise ConfigError(unknown_key(schema, name))
        try:
            return _toml_value(text)
        except tomllib.TOMLDecodeError:
            return text
    kinds = _kinds(known[name])
    if type(None) in kinds and text == "none":
        return text
    if tuple in kinds and not text.startswith("["):
        parts = text.split(",") if text else []
        return [p if str in kinds else _number(name, p) for p in parts]
    if str in kinds and tuple not in kinds:
        return text
    return _number(name, text)


def flatten(config: Section) -> dict[str, Any]:
    """Returns {"train.steps": 100, ...}, in the order of declaration."""
    return {
        f"{name}.{key}" if key else name: value
        for name, table in config
        for key, value in (table if isinstance(table, Section) else [("", table)])
    }


def dumps(config: Section) -> str:
    """Writes a config as TOML, which `load` reads back as an equal one; None becomes "none"."""
    tree = config.model_dump()
    for table in (tree, *tree.values()):
        if isinstance(table, dict):
            table |= {key: "none" for key, value in table.items() if value is None}
    return tomli_w.dumps(tree)


def _read(file: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a TOML file: {error}") from None


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, leaf = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{section} must be a table of keys, got {tree!r}")
    tree[leaf] = value


def _kinds(annotation: Any) -> set[Any]:
    """Returns the plain types in an annotation: `int | None` gives {int, NoneType}; a tuple also
    gives the types of its members."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return {type(value) for value in arguments}
    if origin is typing.Annotated:
        return _kinds(arguments[0])
    if origin is None:
        return {annotation}
    inner = set().union(*(_kinds(a) for a in arguments if a is not Ellipsis))
    return inner | ({tuple} if origin is tuple else set())


def _toml_value(text: str) -> Any:
    return tomllib.loads(f"value = {text}")["value"]


def _number(name: str, text: str) -> Any:
    try:
        return _toml_value(text.lower() if text in ("True", "False") else text)
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"{name} = {text!r} is not a value; write a number, true or false"
        ) from None


def unknown_key(schema: type[Section], name: str) -> str:
    """Returns the error for an unknown key; it names the nearest one, or what replaced it."""
    if (advice := replacement(name)) is not None:
        return advice
    names = [key.name for key in keys(schema)]
    section, _, leaf = name.rpartition(".")
    same_leaf = [n for n in names if n.rpartition(".")[2] == leaf]
    inside = difflib.get_close_matches(
        leaf, [n[len(section) + 1 :] for n in names if n.startswith(f"{section}.")], n=1
    )
    near = [f"{section}.{inside[0]}"] if section and inside else []
    near = near or same_leaf or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "--help lists them"
    return f"{name}: there is no such key; {hint}"


def _explain(schema: type[Section], error: dict[str, Any]) -> list[str]:
    """Translates one of pydantic's errors for the author of a config."""
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        inner = error["input"] if isinstance(error["input"], dict) else {}
        return [unknown_key(schema, f"{name}.{leaf}") for leaf in inner] or [
            unknown_key(schema, name)
        ]
    if error["type"] == "missing":
        inner = [key for key in keys(schema) if key.name.startswith(f"{name}.")]
        missing = [key for key in inner if key.field.is_required()]
        fields = {key.name: key.field for key in missing or keys(schema)}
        names = [key.name for key in missing] or [name]
        return [f"{n} is missing: {_one_line(fields[n].description)}" for n in names]
    if error["type"] == "value_error":
        cause = str(error["ctx"]["error"])
        tables = {key.name.rpartition(".")[0] for key in keys(schema)}
        if name and name not in tables:
            return [f"{name} = {error['input']!r}: {cause}"]
        # A table that appears under several names cannot say its own.
        named = not name or f"{name}." in cause
        return [line if named else f"[{name}] {line}" for line in cause.splitlines()]
    if error["type"] == "tuple_type":
        written = json.dumps([error["input"]], default=str, ensure_ascii=False)
        return [f"{name} = {error['input']!r}: write a list, {name} = {written}"]
    if error["type"].endswith("_type") and error["type"].startswith("model"):
        return [f"[{name}] must be a table of keys, got {error['input']!r}"]
    declared = {key.name: key.field for key in keys(schema)}.get(name)
    meaning = f" ({_one_line(declared.description)})" if declared else ""
    return [f"{name} = {error['input']!r}: {_lower_first(error['msg'])}{meaning}"]


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
