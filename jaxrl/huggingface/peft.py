"""Adapter directories in the format of the PEFT library."""

import contextlib
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxrl.core.precision import DType
from jaxrl.huggingface.files import (
    excerpt,
    finite_cast,
    open_tensors,
    read_object,
    read_parameter,
    refuse_pickles,
    write_json,
    write_tensors,
)
from jaxrl.huggingface.fingerprints import fingerprint
from jaxrl.models import spec
from jaxrl.models.lora import Adapted
from jaxrl.models.spec import Params

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"

# Keys with their only supported values; a key may also be absent.
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
_COPIED = re.compile(r"(embed_tokens|lm_head\.base_layer)\.weight$")
# Variants of LoRA that compute something else from the same tensors.
_VARIANTS = ("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config")
# Beginnings of values of `init_lora_weights` for which PEFT also changes the base, at each load.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def save_adapter(
    directory: str | Path, adapters: Params, *, specs: Adapted, base: str, dtype: DType
) -> None:
    """Writes adapters that `peft.PeftModel.from_pretrained` and vLLM can load.

    Args:
      directory: created if it does not exist.
      adapters: on any devices.
      specs: specs of the adapters and the model.
      base: directory or hub id of the base model.
      dtype: dtype to cast tensors to.

    Raises:
      ValueError: if a finite value of a parameter, which the message names, is infinite in `dtype`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    given = traverse_util.flatten_dict(adapters, sep="/")
    tensors: dict[str, np.ndarray] = {}
    for path, one in spec.flatten(specs.adapters).items():
        value = finite_cast(np.asarray(given[path]), dtype, name=f"parameter {path!r}")
        parts = value if one.stacked else [value]
        tensors |= {n: np.ascontiguousarray(x) for n, x in zip(one.hf_names(), parts, strict=True)}
    write_tensors(directory / _TENSORS, tensors)
    alpha, whole = specs.alpha, _whole_modules(specs)
    content = _PLAIN | {
        "task_type": "SEQ_CLS" if whole else "CAUSAL_LM",
        "modules_to_save": whole or None,
        "base_model_name_or_path": base,
        "r": specs.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "inference_mode": True,
        "target_modules": sorted({n.split(".")[-3] for n in tensors if ".lora_" in n}),
    }
    write_json(directory / _CONFIG, content)


def _whole_modules(specs: Adapted) -> list[str]:
    """Lists the modules that are trained whole: the head of a scorer."""
    names = (one.name for one in spec.flatten(specs.adapters).values())
    return [name.split(".")[-2] for name in names if ".lora_" not in name]


def adapter_fingerprint(directory: str | Path) -> dict[str, str]:
    """Returns the `fingerprint` of the files that `load_adapter` reads."""
    return fingerprint(Path(directory) / name for name in (_CONFIG, _TENSORS))


def load_adapter(directory: str | Path, specs: Adapted, *, dtype: DType) -> Params:
    """Reads adapters that match these specs.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is unreadable, or rank, alpha, kind or tensors differ from the specs;
        the message names the file.
    """
    path, stored = (Path(directory) / name for name in (_CONFIG, _TENSORS))
    config = read_object(path)
    wanted = {"lora.rank": ("r", specs.rank), "lora.alpha": ("lora_alpha", specs.alpha)}
    for ours, (key, value) in wanted.items():
        if config.get(key) != value:
            raise ValueError(
                f"{path}: {key} is {excerpt(config.get(key))} but {ours} is {value!r}; set {ours} "
                "to the value that the adapters were trained with"
            )
    for key, value in (_PLAIN | dict.fromkeys(_VARIANTS)).items():
        if config.get(key) not in (value, None):
            raise ValueError(
                f"{path}: {key}={excerpt(config[key])} is not supported; expected {value!r}"
            )
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_THE_BASE):
        raise ValueError(
            f"{path}: init_lora_weights={begun!r} is not supported: these adapters belong to a "
            "base with other weights; merge them where they were trained, or convert them with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    whole, saved = _whole_modules(specs), config.get("modules_to_save")
    named = saved if isinstance(saved, list) else [] if saved is None else [saved]
    # PEFT lists both names of a head; a model has one of them.
    known = [*whole, "classifier"] if whole else []
    if not all(name in named for name in whole) or not all(name in known for name in named):
        raise ValueError(
            f"{path}: modules_to_save={excerpt(saved)} is not supported; expected {whole or None!r}"
        )
    if not stored.exists():
        refuse_pickles(stored.parent)
    flat = spec.flatten(specs.adapters)
    names = {name for one in flat.values() for name in one.hf_names()}
    with contextlib.ExitStack() as stack:
        tensors = open_tensors([stored], stack)
        if copied := sorted(name for name in tensors if _COPIED.search(name)):
            raise ValueError(
                f"{stored} holds {copied[0]}, a matrix of the base, which PEFT adds to adapters of "
                "lm_head; write it again with save_pretrained(..., save_embedding_layers=False)"
            )
        if odd := sorted(names ^ tensors.keys()):
            raise ValueError(
                f"{stored}: the tensors do not match lora.targets: {', '.join(odd[:5])}"
            )
        values = {path: read_parameter(one, tensors, dtype=dtype) for path, one in flat.items()}
    for path, value in values.items():
        if not np.isfinite(value.astype(np.float32)).all():
            raise ValueError(f"{stored}: {flat[path].name} has values that are not finite")
    return traverse_util.unflatten_dict(
        {path: jnp.asarray(value) for path, value in values.items()}, sep="/"
    )
