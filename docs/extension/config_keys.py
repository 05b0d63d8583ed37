"""The reference of config keys: every key with its type, default and meaning."""

from extension.parsers import Key, Table, parser, tables

# Commands with keys of their own. The others accept the keys of `jaxrl train`.
OTHERS = ("sft", "dpo", "reward-model", "doctor", "generate", "serve")


def text() -> str:
    """Formats the keys of all commands as Markdown."""
    train = tables(parser("train"))
    known = {key for table in train for key in table.keys}
    parts = ["## jaxrl train", *(_table(table) for table in train)]
    for command in OTHERS:
        found = tables(parser(command))
        parts += [f"## jaxrl {command}", _shared(found, known=known)]
        parts += [_differences(table, known=known) for table in found]
    return "\n\n".join(part for part in parts if part)


def _table(table: Table) -> str:
    head = f"### [{table.name}]" if table.name else "### Outside of tables"
    return "\n\n".join([head, table.text, *(_entry(key, index=True) for key in table.keys)])


def _shared(found: list[Table], *, known: set[Key]) -> str:
    same = [key.name for table in found for key in table.keys if key in known]
    return f"As in `jaxrl train`: {', '.join(f'`{name}`' for name in same)}." if same else ""


def _differences(table: Table, *, known: set[Key]) -> str:
    return "\n\n".join(_entry(key, index=False) for key in table.keys if key not in known)


def _entry(key: Key, *, index: bool) -> str:
    default = "required" if key.default == "required" else f"default `{key.default}`"
    lines = [f":::{{confval}} {key.name}", *([] if index else [":no-index:"]), ""]
    kind = key.type.strip("{}").replace(",", " | ") if key.type[0] == "{" else key.type.lower()
    return "\n".join([*lines, f"`{kind}`, {default}", "", key.text, ":::"])
