"""Docstrings as reStructuredText: they are written as plain text with `names` and examples."""

import re

_SEVERAL = re.compile(r"^(  \w+), (\w+): ")


def to_rst(lines: list[str], *, kind: str) -> list[str]:
    """Escapes reStructuredText's markup characters, except in examples and formulas."""
    done, verbatim = list[str](), False
    if kind in ("attribute", "data", "property"):  # napoleon would read a first line "type: text"
        done += ["..", ""]
    for line in lines:
        if line == "Formula:":
            done += ["Formula::", ""]
            verbatim = True
            continue
        if done and done[-1] == "Returns:":  # napoleon would read "type: text"
            done[-1], line = "", f":returns: {line.strip()}"
        indented = line.startswith(" ") or not line
        verbatim = (verbatim and indented) or line.endswith("::")
        in_example = line.lstrip().startswith((">>>", "...")) or (done and _in_example(done, line))
        done.append(line if verbatim or in_example else _escaped(line))
    return done


def _in_example(before: list[str], line: str) -> bool:
    """Says whether a line is the output of an example, which ends at an empty line."""
    for earlier in reversed(before):
        if not earlier.strip() or not line.strip():
            return False
        if earlier.lstrip().startswith(">>>"):
            return True
    return False


def _escaped(line: str) -> str:
    line = _SEVERAL.sub(r"\1,\2: ", line)  # two fields with one description
    parts = re.split(r"(`[^`]*`)", line)
    parts[::2] = [re.sub(r"([*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    line = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "".join(parts))
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", line)
