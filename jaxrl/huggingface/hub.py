"""Models of the Hugging Face hub, by their names."""

import re
from collections.abc import Sequence
from pathlib import Path

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a checkpoint."""
_COPIES = ("consolidated*.safetensors", "original/*")  # of the weights, as authors ran them

CONFIGS = ("*.json",)
"""Files that describe the shapes of a checkpoint."""


def is_name(path: str) -> bool:
    """Returns True for a text in the form of a model's name on the hub."""
    return _NAME.fullmatch(path) is not None


def local_directory(path: str, *, files: Sequence[str] = FILES) -> str:
    """Returns the directory of a model: `path` itself, or the snapshot of a model on the hub.

    Missing files are downloaded into the hub's cache (`HF_HOME`). If the hub cannot be reached, the
    cached snapshot is used. The last part of a snapshot's path is the commit.

    Args:
      path: a directory, or `ORGANISATION/NAME` or `ORGANISATION/NAME@REVISION` on the hub. Any
        other text is returned as it is.
      files: patterns of the files to download.

    Raises:
      ValueError: if neither a directory nor a model on the hub has this name, or the model is not
        in the cache and its download fails.
    """
    named = _NAME.fullmatch(path)
    if Path(path).exists() or named is None:
        return path
    import huggingface_hub

    name, revision = named.groups()
    try:
        return huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=[*files], ignore_patterns=[*_COPIES]
        )
    except Exception as error:  # of several packages
        cause = " ".join(str(error).split())
        raise ValueError(
            f"{path!r} is not a directory, and loading it from the Hugging Face hub failed: "
            f"{cause:.500}"
        ) from error
