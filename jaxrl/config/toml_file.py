"""Reads configs from TOML files and the command line, and writes them as TOML."""

import functools
import json
import operator
import tomllib
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jaxrl.config import trl
from jaxrl.config.section import OpenSection, Section
from jaxrl.core import Precision, nearest

C = TypeVar("C", bound=Section)

_MOST_SHOWN = 200  # characters of a value


class ConfigError(ValueError):
    """An invalid config; the message names each wrong key and the fix."""


def keys(schema: type[Section]) -> dict[str, FieldInfo]:
    """Returns the declaration of every key by its dotted name, in order: {"train.steps": ...}."""
    found = {}
    for name, field in schema.model_fields.items():
        table = _table(field)
        found |= {f"{name}.{key}": k for key, k in keys(table).items()} if table else {name: field}
    return found


def open_tables(schema: type[Section]) -> list[str]:
    """Returns the names of the tables that accept further keys."""
    tables = {name: _table(field) for name, field in schema.model_fields.items()}
    found = [name for name, table in tables.items() if table and issubclass(table, OpenSection)]
    return found + [name for name, key in keys(schema).items() if dict in _kinds(key.annotation)]


def _table(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def load(
    schema: type[C], *, file: str | Path | None = None, overrides: Sequence[tuple[str, str]] = ()
) -> C:
    """Reads a config.

    Args:
      schema: the config class.
      file: a TOML file; only defaults and overrides when absent.
      overrides: (dotted key, text) in the order of the command line.

    Raises:
      ConfigError: for a file that is missing or not TOML, an unknown or missing key, a wrong type
        or a contradiction.
    """
    return override(schema, read_tree(file) if file is not None else {}, overrides)


def override(schema: type[C], tree: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> C:
    """Makes a config from nested dicts and overrides; raises ConfigError as `load`."""
    for name, text in overrides:
        _set(tree, name, parse_value(schema, name, text))
    return validate(schema, tree)


def validate(schema: type[C], tree: Mapping[str, Any]) -> C:
    """Makes a config from nested dicts; raises ConfigError as `load`."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        lines = [line for e in error.errors() for line in _explain(schema, dict(e), tree)]
        shortened = [line if len(line) <= 1000 else f"{line[:1000]}..." for line in lines]
        raise ConfigError("\n".join(dict.fromkeys(shortened))) from None


def parse_value(schema: type[Section], name: str, text: str) -> Any:
    """Parses the value of a key on the command line.

    Strings need no quotes, lists are TOML arrays or separated by commas, anything else is TOML.

    Raises:
      ConfigError: for an unknown key, or a text that is not a TOML value.
    """
    known = keys(schema)
    if name not in known:
        if name.rpartition(".")[0] not in open_tables(schema):
            raise ConfigError(unknown_key(schema, name))
        try:
            return _toml_value(text.lower() if text in ("True", "False") else text)
        except ValueError:
            return text
    kinds = _kinds(known[name].annotation)
    if type(None) in kinds and text == "none":
        return text
    if tuple in kinds and not text.startswith("["):
        parts = text.split(",") if text else []
        return [p if str in kinds else _number(name, p) for p in parts]
    if str in kinds and tuple not in kinds:
        return text
    return _number(name, text)


def arguments(config: Section, *, without: Collection[str] = ()) -> list[str]:
    """Returns the keys of a config that have no default, or another value, as options of a command
    line, which `parse_value` reads back."""
    found: list[str] = []
    for name, key in keys(type(config)).items():
        value = functools.reduce(getattr, name.split("."), config)
        if name in without or (not key.is_required() and value == key.default):
            continue
        members = value if isinstance(value, dict) else {"": value}
        for member, one in members.items():
            option = f"--{name}.{member}" if member else f"--{name}"
            text = json.dumps(one, ensure_ascii=False) if member else _argument(one)
            found += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return found


def _argument(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        parts = [part if isinstance(part, str) else repr(part) for part in value]
        apart = all("," not in part and not part.startswith("[") for part in parts)
        return ",".join(parts) if apart else json.dumps(parts, ensure_ascii=False)
    return _written(value)


def flatten(config: Section) -> dict[str, Any]:
    """Returns {"train.steps": 100, ...}, in the order of declaration, values as in a file."""
    return {
        f"{name}.{key}" if key else name: value
        for name, table in config.model_dump().items()
        for key, value in (table.items() if isinstance(table, dict) else [("", table)])
    }


def dumps(config: Section) -> str:
    """Writes a config as TOML, which `load` reads back as an equal one; None becomes "none"."""
    tree = config.model_dump()
    for table in (tree, *tree.values()):
        if isinstance(table, dict):
            table |= {key: "none" for key, value in table.items() if value is None}
    return tomli_w.dumps(tree)


def read_tree(file: str | Path) -> dict[str, Any]:
    """Reads a TOML file as nested dicts.

    Raises:
      ConfigError: if it cannot be read or is not TOML.
    """
    try:
        content = Path(file).read_bytes()
    except (OSError, ValueError) as error:  # a path with NUL is a ValueError
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file}: cannot be read: {cause}") from None
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a TOML file: {error}; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not a TOML file: {error}") from None


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, leaf = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"[{section}] must be a table of keys, got {toml_text(tree)}")
    tree[leaf] = value


def _kinds(annotation: Any) -> set[Any]:
    """Returns the types that a file holds for an annotation: `int | None` gives {int, NoneType}; a
    tuple also gives the types of its members, and a dtype policy is a text."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return {type(value) for value in arguments}
    if origin is typing.Annotated:
        return _kinds(arguments[0])
    if origin is dict:
        return {dict}
    if origin is None:
        return {str if annotation is Precision else annotation}
    inner = set().union(*(_kinds(a) for a in arguments if a is not Ellipsis))
    return inner | ({tuple} if origin is tuple else set())


def _toml_value(text: str) -> Any:
    """Parses one TOML value; raises ValueError for anything else."""
    if "\n" in text or "\r" in text:
        raise ValueError("a value must be on one line")
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _number(name: str, text: str) -> Any:
    try:
        return _toml_value(text.lower() if text in ("True", "False") else text)
    except ValueError:
        raise ConfigError(
            f"{name} = {toml_text(text)} is not a value; write a number, true or false"
        ) from None


def unknown_key(schema: type[Section], name: str) -> str:
    """Returns the error for an unknown key; it names the nearest one, or
    the one that replaces an argument of TRL."""
    if not name.isprintable():
        return f"{toml_text(name)}: there is no such key; --help all lists them"
    names, given = list(keys(schema)), name
    name = name.replace("-", "_")
    renamed = trl.rename(name, known=names, open_tables=open_tables(schema))
    if renamed is not None:
        return f"{given}: there is no such key; {renamed}"
    section, _, leaf = name.rpartition(".")
    same_leaf = [n for n in names if n.rpartition(".")[2] == leaf]
    inside = nearest(leaf, [n[len(section) + 1 :] for n in names if n.startswith(f"{section}.")])
    if section and inside:
        near = f"{section}.{inside}"
    elif (path := f"{name}.path") in names:
        near = path
    else:
        near = same_leaf[0] if same_leaf else nearest(name, names)
    hint = f"did you mean {near}?" if near else "--help all lists them"
    return f"{given}: there is no such key; {hint}"


def _explain(schema: type[Section], error: dict[str, Any], tree: Mapping[str, Any]) -> list[str]:
    """Translates one of pydantic's errors for the author of a config."""
    path, given, known = error["loc"], error["input"], keys(schema)
    name = ".".join(map(str, path))
    for depth in range(1, len(path)):  # an error inside a list is one of its key
        if (key := ".".join(map(str, path[:depth]))) in known:
            whole = toml_text(functools.reduce(operator.getitem, path[:depth], tree))
            if error["type"] == "missing":
                return [f"{key} = {whole}: the list is too short{_meaning(known, key)}"]
            return [f"{key} = {whole}: {_reason(error)} at place {path[depth] + 1}"]
    if error["type"] == "extra_forbidden":
        inner = given if isinstance(given, dict) else {}
        return [unknown_key(schema, n) for n in [f"{name}.{leaf}" for leaf in inner] or [name]]
    if error["type"] == "missing":
        inner = [n for n, key in known.items() if n.startswith(f"{name}.") and key.is_required()]
        return [f"{n} is missing: {one_line(known[n].description)}" for n in inner or [name]]
    if error["type"] == "value_error":
        cause = str(error["ctx"]["error"])
        if name and name not in {n.rpartition(".")[0] for n in known}:
            return [f"{name} = {toml_text(given)}: {cause}"]
        # A table that is used under several names does not know its own.
        named = not name or f"{name}." in cause
        return [line if named else f"[{name}] {line}" for line in cause.splitlines()]
    if error["type"] == "tuple_type":
        written = json.dumps([given], default=str, ensure_ascii=False)
        return [f"{name} = {toml_text(given)}: write a list, {name} = {written:.{_MOST_SHOWN}}"]
    if error["type"].endswith("_type") and error["type"].startswith("model"):
        return [f"[{name}] must be a table of keys, got {toml_text(given)}"]
    return [f"{name} = {toml_text(given)}: {_reason(error)}{_meaning(known, name)}"]


def _meaning(known: Mapping[str, FieldInfo], name: str) -> str:
    return f" ({one_line(known[name].description)})" if name in known else ""


def _reason(error: Mapping[str, Any]) -> str:
    """Returns the text of one of pydantic's errors, without its prefix."""
    text = str(error["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def toml_text(value: Any) -> str:
    """Formats a value for a message as a file holds it, shortened if it is long."""
    try:
        text = _written(value)
    except (ValueError, RecursionError):  # Python writes integers of at most 4,300 digits
        return f"{type(value).__name__} (too long to show)"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _written(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(_written, value))}]"
        case dict():
            members = (f"{key} = {_written(member)}" for key, member in value.items())
            return f"{{{', '.join(members)}}}"
    return repr(value)


def one_line(text: str | None) -> str:
    """Joins the words of a text with single spaces."""
    return " ".join((text or "").split())
