"""Digests of what a run reads again at each start: prompts as rendered, tokenizer, weights.

The config names files, which may change between two starts. `inputs.json` in the run directory
holds what they were: XXH3 (128 bits), which runs at memory speed. A file of weights with the size,
time of change and inode of the last start is not read again.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from pydantic import TypeAdapter

from jaxrl.builders.learner import holds_reference
from jaxrl.builders.model import ModelFiles
from jaxrl.builders.task import TaskData
from jaxrl.config.data import HeldOutConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import Rollout, check_regular, read_whole, write_whole
from jaxrl.data import Example, Pair
from jaxrl.huggingface import Checkpoint
from jaxrl.losses import Recipe
from jaxrl.training.run_directory import ResumeError, holds_checkpoints

TRAINING, HELD_OUT = "training data", "held-out data"

_FILE = "inputs.json"
_CONFIGS = ("config.json", "adapter_config.json")
_WEIGHTS = (".safetensors", ".safetensors.index.json")

Stat = tuple[int, int, int]
"""Size in bytes, time of change in ns and inode of a file."""


class Input(NamedTuple):
    """Something that a run reads at each start."""

    name: str  # in words, as errors name it
    key: str  # the key that names it, with its value; with another one it is not compared
    digests: Mapping[str, str] = {}  # of its parts, by name
    files: tuple[Path, ...] = ()  # further parts


class Known(NamedTuple):
    """An input at the last start."""

    key: str
    digests: dict[str, str]  # of parts and files
    stats: dict[str, Stat]  # of files


Inputs = dict[str, Known]
"""The inputs of a run by name."""

_SCHEMA = TypeAdapter(Inputs)


def rows_input(name: str, key: str, rows: Iterable[Example | Rollout | Pair]) -> Input:
    """Describes tokenised data, in its order."""
    return Input(name, key, {"rows": rows_digest(rows)})


def model_inputs(
    config: Config | SupervisedConfig, checkpoint: Checkpoint, *, reference: bool
) -> Iterator[Input]:
    """Yields the tokenizer and config.json of the model that a run starts from, and the weights
    that no checkpoint holds: the base of adapters, and the reference if the run has one."""
    path, rank, tokenizer = config.model.path, config.lora.rank, checkpoint.tokenizer
    parts = {
        "vocabulary": tokenizer.get_vocab(),
        "chat template": tokenizer.chat_template,
        "end tokens": checkpoint.end_ids,
    }
    yield Input("tokenizer", _key("model.path", path), {k: digest(v) for k, v in parts.items()})
    read = rank or reference
    name = "base weights" if rank else "reference weights" if reference else "model"
    yield directory_input(name, "model.path", path, suffixes=_WEIGHTS if read else ())
    if reference and config.lora.path is not None:
        yield directory_input("reference adapters", "lora.path", config.lora.path)


def run_inputs(config: Config, recipe: Recipe, task: TaskData, models: ModelFiles) -> list[Input]:
    """Returns the inputs of a run that samples."""
    data, reference = config.data, holds_reference(config, recipe)
    found = [rows_input(TRAINING, _key("data.path", data.path), task.prompts.examples)]
    if task.held_out is not None:
        found.append(held_out_input(data, task.held_out.examples))
    found += model_inputs(config, models.policy, reference=reference)
    if models.scorer is not None:
        name = "reward model" if models.scorer.config.scored else "teacher"
        found.append(directory_input(name, "reward.model", str(models.scorer.directory)))
    if recipe.critic is not None and config.critic.path is not None:
        # Its weights are in the checkpoints.
        found.append(directory_input("critic", "critic.path", config.critic.path, suffixes=()))
    return found


def held_out_input(data: HeldOutConfig, rows: Iterable[Example | Pair]) -> Input:
    """Describes tokenised held-out data."""
    key = f"{_key('data.eval_path', data.eval_path)}, {_key('data.eval_limit', data.eval_limit)}"
    return rows_input(HELD_OUT, key, rows)


def directory_input(
    name: str, key: str, path: str, *, suffixes: tuple[str, ...] = _WEIGHTS
) -> Input:
    """Describes a model or adapters in the directory `path`: the configs, and the files with the
    suffixes."""
    paths = sorted(Path(path).glob("*"))  # a missing directory is left to its reader
    files = (p for p in paths if p.name in _CONFIGS or p.name.endswith(suffixes))
    return Input(name, _key(key, path), files=tuple(files))


def _key(key: str, value: object) -> str:
    return f"{key} = {value!r}"


def digest(value: Any) -> str:
    """Returns the digest of a JSON value; other objects in it count by their text."""
    return xxhash.xxh3_128_hexdigest(_json(value))


def rows_digest(rows: Iterable[Example | Rollout | Pair]) -> str:
    """Returns the digest of rows: the tokens, and all columns that a reward may read."""
    hasher = xxhash.xxh3_128()
    for row in rows:
        for part in _parts(row):
            hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()


def file_digest(path: Path) -> str:
    """Returns the digest of a file's bytes; raises as `check_regular`."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _parts(row: Example | Rollout | Pair) -> Iterator[bytes]:
    match row:
        case Example():
            yield from (_json(dict(row.record)), row.tokens.tobytes())
        case Pair():
            yield from (*_parts(row.chosen), *_parts(row.rejected), _json(row.margin))
        case Rollout():
            yield from (x.tobytes() for x in (row.prompt, row.completion, row.action_mask))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text  # an address says nothing


def compare_inputs(directory: Path, inputs: Iterable[Input]) -> Inputs:
    """Compares inputs with those of the run in the directory, if it has checkpoints.

    Returns:
      The inputs as they are now, for `write_inputs`.

    Raises:
      ResumeError: if an input under the same key has changed; the message names all that have.
    """
    known = read_inputs(directory)
    found = {one.name: read_input(one, known.get(one.name)) for one in inputs}
    if holds_checkpoints(directory) and (changed := differences(known, found)):
        raise ResumeError(
            f"{directory} holds a run with other inputs, by its {_FILE}. Changed since its last "
            f"start: {'; '.join(changed)}. Data count as rendered, with a date that the template "
            "inserts. Put back what was there, or choose another run_dir, with "
            f"--fork {directory} to go on from its last checkpoint with what is here now"
        )
    return found


def read_input(one: Input, old: Known | None = None) -> Known:
    """Digests the files of an input, except those that are as at the last start."""
    digests, stats = dict(one.digests), dict[str, Stat]()
    for path in one.files:
        stat = path.stat()
        stats[path.name] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        same = old is not None and old.stats.get(path.name) == stats[path.name]
        kept = old.digests.get(path.name) if same and old is not None else None
        digests[path.name] = kept or file_digest(path)
    return Known(one.key, digests, stats)


def differences(there: Inputs, here: Inputs) -> list[str]:
    """Names the inputs in `here` that differ from those under the same key in `there`."""
    changed = []
    for name, one in here.items():
        old = there.get(name)
        if old is None or old.key != one.key or old.digests == one.digests:
            continue
        parts = sorted({part for part, _ in old.digests.items() ^ one.digests.items()} - {"rows"})
        changed.append(f"{name} ({one.key}{': ' * bool(parts)}{', '.join(parts)})")
    return changed


def has_other(name: str, *, there: Inputs, here: Inputs) -> bool:
    """Tells if an input has another content here, or is only in one of the two."""
    old, new = there.get(name), here.get(name)
    return (old and old.digests) != (new and new.digests)


def held_out_digest(here: Inputs) -> str:
    """Returns a text that changes with the held-out data; "" without any."""
    return digest(here[HELD_OUT].digests) if HELD_OUT in here else ""


OTHER_HELD_OUT = (
    f"other {HELD_OUT} than at the last checkpoint: the accuracies before, and the best checkpoint "
    "so far, are those of the old data"
)
"""The line about a resumed run whose keys data.eval_* have changed."""


def read_inputs(directory: Path) -> Inputs:
    """Reads the inputs of the run in a directory; none if it did not keep them.

    Raises:
      ResumeError: for a damaged file.
    """
    path = directory / _FILE
    try:
        content = read_whole(path)
        return {} if content is None else _SCHEMA.validate_json(content)
    except ValueError as error:
        raise ResumeError(
            f"{path} does not hold the inputs of a run: {error}. Delete it if data, tokenizer and "
            "models are as they were"
        ) from None


def write_inputs(directory: Path, inputs: Inputs) -> None:
    """Writes the inputs of the run in a directory."""
    content = {name: one._asdict() for name, one in inputs.items()}
    write_whole(directory / _FILE, json.dumps(content, indent=1))
