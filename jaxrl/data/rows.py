"""Rows of data: records of a file or of a data set on the hub, and their columns."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.data.reasoning_gym import REASONING_GYM, task_rows


class Row(NamedTuple):
    """One record, and its place for error messages."""

    where: str  # "prompts.jsonl:17"
    record: dict[str, Any]


def read_rows(path: str, *, split: str = "train") -> Iterator[Row]:
    """Reads a .jsonl or .parquet file, a data set of the Hugging Face hub, or makes the rows of a
    task of reasoning-gym.

    Args:
      path: a file, or a hub data set: `ID`, `ID:SUBSET` or `ID:SUBSET:SPLIT`, or
        `reasoning_gym:TASK` as in `task_rows`.
      split: split of a hub data set whose path names none, or of a task.

    Raises:
      ValueError: for a missing file, an unknown format, or a line that is not a JSON object; the
        message names file and line.
      ModuleNotFoundError: for a hub id without the package datasets, or a task without the package
        reasoning-gym.
    """
    if path.startswith(REASONING_GYM):
        return (Row(*one) for one in task_rows(path, split=split))
    if (read := READERS.get(Path(path).suffix)) is not None:
        if not Path(path).is_file():
            raise ValueError(f"{path} is not a file; relative paths start at {Path.cwd()}")
        return _not_empty(read(Path(path)), path)
    if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(f"{path}: expected a .jsonl or .parquet file, or a hub data set")
    name, subset, named_split, *more = [*path.split(":"), "", ""]
    if len(more) > 2:
        raise ValueError(f"{path}: write a hub data set as ID, ID:SUBSET or ID:SUBSET:SPLIT")
    return _read_hub(name, split=named_split or split, subset=subset or None)


def read_column(record: Mapping[str, Any], key: str, *, where: str) -> Any:
    """Returns the value of a column; raises ValueError if it is missing."""
    if record.get(key) is None:
        names = ", ".join(map(repr, record))
        raise ValueError(f"{where}: no {key!r}; the columns are {names:.500}")
    return record[key]


def read_text(record: Mapping[str, Any], key: str, *, where: str) -> str:
    """Returns the text of a column; raises ValueError if it is missing or not a text."""
    value = read_column(record, key, where=where)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key!r} is {value!r:.80}, expected a text")
    return value


def check_characters(text: str) -> None:
    """Checks that a text can be encoded; raises ValueError for half of a character, which escapes
    in JSON and in templates can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{text[error.start]!r} is half of a character (a lone surrogate), which no tokenizer "
            "takes; write the whole character"
        ) from None


def _not_empty(rows: Iterator[Row], path: str) -> Iterator[Row]:
    row = None
    for row in rows:
        yield row
    if row is None:
        raise ValueError(f"{path}: the file has no rows")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                record = json.loads(text)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8: {error}; save the file as UTF-8") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: expected an object with keys, got {text:.80}")
            if "\\u" in text:
                try:
                    check_characters(json.dumps(record, ensure_ascii=False))
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
            yield Row(where, record)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    # A broken file does not always raise one of pyarrow's own errors.
    errors = (pyarrow.ArrowException, ArithmeticError, OSError, TypeError, ValueError)
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            records = (record for batch in file.iter_batches() for record in batch.to_pylist())
            for number, record in enumerate(records, start=1):
                yield Row(f"{path}: row {number}", _as_written(record))
    except errors as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"{path}: not readable as parquet after row {number}: {cause}") from error


def _as_written(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row without the keys that Arrow adds to messages and tools as None, because all
    rows of a column have the same keys there."""
    return {
        key: _without_none(value) if key == "tools" or _has_roles(value) else value
        for key, value in record.items()
    }


def _has_roles(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(member) for key, member in value.items() if member is not None}
    return [_without_none(member) for member in value] if isinstance(value, list) else value


def _read_hub(path: str, *, split: str, subset: str | None) -> Iterator[Row]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"data {path!r} is not a file; reading it from the Hugging Face hub needs the package "
            "datasets: pip install datasets"
        ) from None
    try:
        rows = datasets.load_dataset(path, name=subset, split=split)
    except Exception as error:
        raise ValueError(
            f"data {path!r} (subset {subset!r}, split {split!r}) is not a file, and loading it "
            f"from the Hugging Face hub failed: {error}"
        ) from error
    for number, record in enumerate(rows):
        yield Row(f"{path}[{split}] row {number}", _as_written(record))


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
"""Readers of files by suffix."""
