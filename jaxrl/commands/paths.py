"""The paths that a config names: models of the hub, and checks that name the key."""

import errno
import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from jaxrl.bridge import directory_of
from jaxrl.config import toml_file
from jaxrl.config.bucket import is_bucket
from jaxrl.config.section import Section, is_http_address
from jaxrl.data import is_pattern, named_files
from jaxrl.huggingface import hub

C = TypeVar("C", bound=Section)

_MODELS = ("model.path", "reward.model", "critic.path")
# Of all commands. `commands/export` and others name their arguments themselves.
_DIRECTORIES = (*_MODELS, "lora.path", "run_dir", "out", "sampler.store")
_DATA = ("data.path", "data.eval_path")
_FILES = (*_DATA, "sampler.python", "python", "log")
_FUNCTIONS = (
    "reward.path",
    "judge.path",
    "environment.name",
    "environment.tools",
    "loss.name",
    "loss.advantage",
)
_INPUTS = (*_MODELS, "lora.path", *_DATA, "sampler.python", *_FUNCTIONS)


def config_of(run: Path) -> Path:
    """Returns the config.toml of a run.

    Raises:
      ValueError: if the directory is not a run's.
    """
    if not (run / "config.toml").exists():
        there = "it has no config.toml" if run.is_dir() else "there is no such directory"
        raise ValueError(
            f"{run} is not a run: {there}; name the run_dir of a run that was started; relative "
            f"paths start at {Path.cwd()}"
        )
    return run / "config.toml"


def check_paths(config: Section) -> None:
    """Checks the files and directories that a config names; missing ones are left to their readers.

    Raises:
      ConfigError: for a path that the file system refuses (too long, through a file, in a circle of
        links), a file in place of a directory or the reverse, or an unreadable one; the message
        names the key.
    """
    for key, text in _texts(config):
        if (problem := _problem(key, text)) is not None:
            raise toml_file.ConfigError(f"{key} = {toml_file.toml_text(text)}: {problem}")


def find_beside(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the tables of a config's file with the inputs that are only in the file's folder: a
    relative path that does not exist, but does from there, becomes a path to it."""

    def found(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            inner = f"{key}." if key else ""
            return {name: found(f"{inner}{name}", one) for name, one in value.items()}
        if isinstance(value, list):
            return [found(key, one) for one in value]
        if not isinstance(value, str) or key not in _INPUTS:
            return value
        name, there = _file_of(value) if key in _FUNCTIONS else value, folder
        try:
            if key in _DATA and is_pattern(name):
                there = Path(glob.escape(str(folder)))
                beside = not named_files(name) and named_files(str(there / name))
            else:
                beside = name and not os.path.exists(name) and (folder / name).exists()
        except (OSError, ValueError):  # `check_paths` explains them
            return value
        return value.replace(name, str(there / name), 1) if beside else value

    return found("", tree)


def find_inputs(config: C) -> C:
    """Looks for the model, data and functions that a config names; returns it as `fetch_models`.

    Raises:
      ConfigError: if several do not exist, naming all (a single one is left to its reader); also
        as `fetch_models`.
    """
    missing = [
        f"{key} = {toml_file.toml_text(text)}"
        for key, text in _texts(config)
        if _is_missing(key, text)
    ]
    if len(missing) > 1:
        raise toml_file.ConfigError(
            f"these do not exist: {', '.join(missing)}; relative paths start at {Path.cwd()}, and "
            "those in a config also at its folder"
        )
    return fetch_models(config)


def fetch_models(config: C, *, files: Sequence[str] = hub.FILES) -> C:
    """Replaces the names of models on the Hugging Face hub by directories, downloading these files.

    Raises:
      ConfigError: as `hub.local_directory`; the message names the key.
    """
    for key in _MODELS:
        name, _, leaf = key.partition(".")
        table = getattr(config, name, None)
        path = getattr(table, leaf, None)
        if path is None or is_http_address(path):  # a served teacher
            continue
        if is_bucket(path):
            config = _with(config, name, leaf, _copied(path, key=key, files=files))
            continue
        try:
            directory = hub.local_directory(path, files=files)
        except ValueError as error:
            raise toml_file.ConfigError(f"{key} = {error}") from error
        config = _with(config, name, leaf, directory)
    return config


def _with(config: C, name: str, leaf: str, directory: str) -> C:
    table = getattr(config, name)
    return config.model_copy(update={name: table.model_copy(update={leaf: directory})})


def _copied(address: str, *, key: str, files: Sequence[str]) -> str:
    """Brings the model of a run in a bucket, RUN/model; returns its directory."""
    from jaxrl.training.copies import copy_of  # takes seconds, so not for --help

    run, _, folder = address.rstrip("/").rpartition("/")

    def want(paths: Iterable[str]) -> list[str]:
        inner = {path: path.removeprefix(f"{folder}/") for path in paths}
        chosen = [p for p, i in inner.items() if p != i and any(fnmatch(i, f) for f in files)]
        if not chosen:
            raise toml_file.ConfigError(
                f"{key} = {address!r}: the run {run} has no {folder}; a run writes its model when "
                f"it ends, and `jaxrl export {run} DIR` writes that of a checkpoint"
            )
        return chosen

    try:
        return str(copy_of(run, kind=folder, want=want) / folder)
    except toml_file.ConfigError:
        raise
    except ValueError as error:
        raise toml_file.ConfigError(f"{key} = {address!r}: {error}") from error


def _texts(config: Section) -> Iterator[tuple[str, str]]:
    """Yields every text of a config, also those in lists, with its key."""
    for key, value in toml_file.flatten(config).items():
        for text in value if isinstance(value, tuple) else [value]:
            if isinstance(text, str):
                yield key, text


def _is_missing(key: str, text: str) -> bool:
    """Tells if the key names a file or directory that does not exist."""
    if key in _MODELS:
        local = not (is_http_address(text) or is_bucket(text) or hub.is_name(text))
    elif key in _FUNCTIONS:
        text = _file_of(text)
        local = text != ""
    else:
        return key in _DATA and named_files(text) == []
    return local and not Path(text).exists()


def _problem(key: str, text: str) -> str | None:
    """Describes the problem with the path of a key; None without a problem or a path."""
    is_directory = key in _DIRECTORIES
    if key == "sampler.store":
        text = str(directory_of(text) or "")
    elif key in _FUNCTIONS:
        text = _file_of(text)
    elif not is_directory and key not in _FILES:
        return None
    try:
        found = os.stat(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    if stat.S_ISDIR(found.st_mode) != is_directory:
        return f"expected {'a directory' if is_directory else 'a file, not a directory'}"
    if not os.access(text, os.R_OK | os.X_OK if is_directory else os.R_OK):
        return os.strerror(errno.EACCES)
    return None


def _file_of(reference: str) -> str:
    """Returns the file of `file.py:function` or `search:FILE`; "" for other names."""
    name, _, corpus = reference.partition(":")
    file = reference.rpartition(":")[0]
    return corpus if name == "search" else file * file.endswith(".py")
