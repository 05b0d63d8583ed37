"""The config.json of a Hugging Face checkpoint directory."""

from pathlib import Path

from jaxrl.huggingface.config import convert
from jaxrl.huggingface.config.quantization import quant_method
from jaxrl.huggingface.files import named, read_object
from jaxrl.models.families import DecoderConfig


def load_config(directory: str | Path) -> DecoderConfig:
    """Reads config.json.

    Raises:
      ValueError: if the directory has none or does not exist, or as `convert.from_hf_config`; the
        message names the file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"the model '{directory}' is not a directory; relative paths start at {Path.cwd()}"
        )
    path = directory / "config.json"
    if not path.exists():
        inside = directory / "model"
        near = f"; did you mean '{inside}'?" if (inside / "config.json").exists() else ""
        raise ValueError(f"the model '{directory}' has no config.json{near}")
    raw = read_object(path)
    with named(path):
        return convert.from_hf_config(raw)


def is_quantised(directory: str | Path) -> bool:
    """Tells if weights of a checkpoint directory are in MXFP4 or FP8; raises ValueError without a
    config.json."""
    return quant_method(read_object(Path(directory) / "config.json")) in ("mxfp4", "fp8")
