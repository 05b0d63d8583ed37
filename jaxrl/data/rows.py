"""Rows of data: records of a file or of a data set on the hub, and their columns."""

import glob
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.data.reasoning_gym import REASONING_GYM, task_rows


class Row(NamedTuple):
    """One record, and its place for error messages."""

    where: str  # "prompts.jsonl:17"
    record: dict[str, Any]


def read_rows(path: str, *, split: str = "train", key: str | None = None) -> Iterator[Row]:
    """Reads files, a data set of the Hugging Face hub, or makes the rows of a task of
    reasoning-gym.

    Args:
      path: a .jsonl, .jsonl.gz or .parquet file, or a pattern of such files, as
        `data/train-*.parquet`, which are read one after another in the order of their names. Or a
        hub data set: `ID`, `ID:SUBSET` or `ID:SUBSET:SPLIT`. Or `reasoning_gym:TASK` as in
        `task_rows`.
      split: split of a hub data set whose path names none, or of a task.
      key: the config's key that holds the path, for error messages.

    Raises:
      ValueError: for a missing file, a pattern that no file matches, an unknown format, or a line
        that is not a JSON object; the message names file and line.
      ModuleNotFoundError: for a hub id without the package datasets, or a task without the package
        reasoning-gym.
    """
    named = repr(path) if key is None else f"{key} = {path!r}"
    if path.startswith(REASONING_GYM):
        return (Row(*one) for one in task_rows(path, split=split, named=named))
    files = named_files(path)
    if files is None and not (path.startswith((".", "/", "~")) or path.count("/") > 1):
        name, subset, named_split, *more = [*path.split(":"), "", ""]
        if len(more) > 2:
            raise ValueError(f"{named}: write a hub data set as ID, ID:SUBSET or ID:SUBSET:SPLIT")
        return _read_hub(name, split=named_split or split, subset=subset or None, named=named)
    if not files:
        fault = "no file matches this pattern" if is_pattern(path) else "there is no such file"
        raise ValueError(f"{named}: {fault}; relative paths start at {Path.cwd()}")
    readers = [(file, _reader(file)) for file in files]
    for file, read in readers:
        if read is None:
            raise ValueError(
                f"{named}: {file} does not end in {' or '.join(READERS)}; convert it, or name a "
                "data set of the Hugging Face hub"
            )
    return _not_empty((row for file, read in readers if read for row in read(file)), path)


def is_pattern(path: str) -> bool:
    """Tells if a path is a pattern, with *, ? or [...], and not the name of a file."""
    return any(character in path for character in "*?[") and not Path(path).exists()


def named_files(path: str) -> list[Path] | None:
    """Returns the files that a path or a pattern names, sorted; none if they are missing, and None
    for a path that may be a data set of the hub."""
    if is_pattern(path):
        return sorted(
            file for file in map(Path, glob.iglob(path, recursive=True)) if file.is_file()
        )
    known = path.endswith(tuple(READERS))
    if Path(path).is_file() or (Path(path).exists() and not known):
        return [Path(path)]
    return [] if known else None


def read_column(
    record: Mapping[str, Any], key: str, *, where: str, setting: str | None = None
) -> Any:
    """Returns the value of a column; raises ValueError if it is missing or null. `setting` is the
    config's key that names the column, for the message."""
    if key in record and record[key] is None:
        raise ValueError(f"{where}: {key!r} is null; write a value, or remove the row")
    if key not in record:
        names = ", ".join(map(repr, record))
        remedy = f"; set {setting}" if setting else ""
        raise ValueError(f"{where}: no {key!r}; the columns are {names:.500}{remedy}")
    return record[key]


def read_text(
    record: Mapping[str, Any], key: str, *, where: str, setting: str | None = None
) -> str:
    """Returns the text of a column; raises ValueError if it is missing or not a text. `setting` is
    as for `read_column`."""
    value = read_column(record, key, where=where, setting=setting)
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
        yield from _rows(lines, path)


def _read_gzip(path: Path) -> Iterator[Row]:
    try:
        with gzip.open(path) as lines:
            yield from _rows(lines, path)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as gzip: {error}") from error


def _rows(lines: Iterable[bytes], path: Path) -> Iterator[Row]:
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


def _read_hub(path: str, *, split: str, subset: str | None, named: str) -> Iterator[Row]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{named} is not a file; relative paths start at {Path.cwd()}. Reading it from the "
            "Hugging Face hub needs the package datasets: pip install datasets"
        ) from None
    try:
        rows = datasets.load_dataset(path, name=subset, split=split)
    except Exception as error:
        raise ValueError(
            f"{named} is not a file; relative paths start at {Path.cwd()}. Loading it from the "
            f"Hugging Face hub (subset {subset!r}, split {split!r}) failed: {error}"
        ) from error
    for number, record in enumerate(rows):
        yield Row(f"{path}[{split}] row {number}", _as_written(record))


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_gzip,
    ".parquet": _read_parquet,
}
"""Readers of files by the end of their names."""


def _reader(file: Path) -> Callable[[Path], Iterator[Row]] | None:
    return next((read for end, read in READERS.items() if file.name.endswith(end)), None)
