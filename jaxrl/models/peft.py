"""Adapter directories in the format of the PEFT library."""

import contextlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from jaxrl.core.precision import DType
from jaxrl.models import spec
from jaxrl.models.checkpoint_files import (
    open_tensors,
    read_object,
    read_parameter,
    refuse_pickles,
    shown,
)
from jaxrl.models.lora import Adapted
from jaxrl.models.spec import Params

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"

# The only supported values of these keys; a key may also be absent.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}


def save(
    directory: str | Path, adapters: Params, *, specs: Adapted, base: str, dtype: DType
) -> None:
    """Writes adapters that `peft.PeftModel.from_pretrained` and vLLM can load.

    Args:
      directory: created if it does not exist.
      adapters: on any devices.
      specs: of the adapters and the model.
      base: directory or hub id of the base model.
      dtype: dtype to cast tensors to.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    given = traverse_util.flatten_dict(adapters, sep="/")
    tensors: dict[str, np.ndarray] = {}
    for path, one in spec.flatten(specs.adapters).items():
        value = np.asarray(given[path]).astype(dtype)
        tensors |= {n: np.ascontiguousarray(x) for n, x in zip(one.hf_names(), value, strict=True)}
    save_file(tensors, directory / _TENSORS, metadata={"format": "pt"})
    alpha = specs.alpha
    content = _PLAIN | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": specs.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    (directory / _CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def load(directory: str | Path, specs: Adapted, *, dtype: DType) -> Params:
    """Reads adapters that match these specs.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is unreadable, or their rank, alpha, kind or tensors differ; the message
        names the file.
    """
    path, stored = (Path(directory) / name for name in (_CONFIG, _TENSORS))
    config = read_object(path)
    wanted = {"lora.rank": ("r", specs.rank), "lora.alpha": ("lora_alpha", specs.alpha)}
    for ours, (key, value) in wanted.items():
        if config.get(key) != value:
            raise ValueError(
                f"{path}: {key} is {shown(config.get(key))} but {ours} is {value!r}; set {ours} to "
                "the value that the adapters were trained with"
            )
    for key, value in _PLAIN.items():
        if config.get(key) not in (value, None):
            raise ValueError(
                f"{path}: {key} is {shown(config[key])}, which is not supported; expected {value!r}"
            )
    if not stored.exists():
        refuse_pickles(stored.parent)
    flat = spec.flatten(specs.adapters)
    names = {name for one in flat.values() for name in one.hf_names()}
    with contextlib.ExitStack() as stack:
        tensors = open_tensors([stored], stack)
        if odd := sorted(names ^ tensors.keys()):
            raise ValueError(
                f"{stored}: its tensors are not those of lora.targets: {', '.join(odd[:5])}"
            )
        values = {path: read_parameter(one, tensors, dtype=dtype) for path, one in flat.items()}
    for path, value in values.items():
        if not np.isfinite(value.astype(np.float32)).all():
            raise ValueError(f"{stored}: {flat[path].name} has values that are not finite")
    return traverse_util.unflatten_dict(
        {path: jnp.asarray(value) for path, value in values.items()}, sep="/"
    )
