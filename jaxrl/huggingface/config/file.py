"""The config.json of a Hugging Face checkpoint directory."""

from pathlib import Path
from typing import Any

from jaxrl.huggingface.files import read_object


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json.

    Raises:
      ValueError: if the directory or the file does not exist, or the file holds no JSON object; the
        message names the file.
    """
    if not directory.is_dir():
        raise ValueError(
            f"the model '{directory}' is not a directory; relative paths start at {Path.cwd()}"
        )
    path = directory / "config.json"
    if not path.exists():
        inside = directory / "model"
        near = f"; did you mean '{inside}'?" if (inside / "config.json").exists() else ""
        raise ValueError(f"the model '{directory}' has no config.json{near}")
    return read_object(path)
