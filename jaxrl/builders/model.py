"""Loads models from the checkpoint that a config names."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import traverse_util

from jaxrl.config.tables import LoraConfig
from jaxrl.config.training import Config
from jaxrl.core.precision import DType, Precision
from jaxrl.models import huggingface, kernels, lora, peft, spec
from jaxrl.models.decoder import Model, decoder
from jaxrl.models.families import DecoderConfig
from jaxrl.models.kernels import Wanted
from jaxrl.models.spec import Params, Specs
from sharding.partition import Layout
from sharding.transfer import place


def make_decoder(
    config: DecoderConfig, *, layout: Layout, remat: str, attention: Wanted = "auto"
) -> Model:
    """Builds a decoder for the layout's devices."""
    return decoder(
        config,
        remat=remat,
        constrain=layout.constrain,
        local=layout.local,
        attend=kernels.attend(attention, layout=layout, config=config),
    )


def attention_note(
    wanted: Wanted, *, config: DecoderConfig, layout: Layout, policy: Precision, length: int
) -> str:
    """Describes the attention kernel for rows of `length` tokens, for the log.

    Raises:
      ValueError: as `kernels.choose`.
    """
    kernel = kernels.choose(wanted, layout=layout, config=config, precision=policy, length=length)
    first = layout.mesh.devices.flat[0]
    return f"attention by {kernel} on {layout.mesh.size} x {first.device_kind}"


def load_model(
    path: str,
    *,
    layout: Layout,
    dtype: DType,
    remat: str = "none",
    attention: Wanted = "auto",
) -> tuple[Model, Params]:
    """Loads a language model's checkpoint, its parameters sharded by the layout.

    Raises:
      FileNotFoundError, ValueError: as `huggingface.load`; also for a reward model.
    """
    config = huggingface.load_config(path)
    if config.scored:
        raise ValueError(f"{path} is a reward model; a causal language model is required")
    model = make_decoder(config, layout=layout, remat=remat, attention=attention)
    return model, _load(model, path, load=huggingface.load, layout=layout, dtype=dtype)


def load_scorer(
    path: str,
    *,
    layout: Layout,
    dtype: DType,
    remat: str = "none",
    attention: Wanted = "auto",
) -> tuple[Model, Params]:
    """Loads a reward model, or starts one from a language model; otherwise as `load_model`.

    Raises:
      FileNotFoundError, ValueError: as `huggingface.load_scorer`.
    """
    config = dataclasses.replace(huggingface.load_config(path), scored=True)
    model = make_decoder(config, layout=layout, remat=remat, attention=attention)
    return model, _load(model, path, load=huggingface.load_scorer, layout=layout, dtype=dtype)


def _load(
    model: Model,
    path: str,
    *,
    load: Callable[..., tuple[DecoderConfig, Params]],
    layout: Layout,
    dtype: DType,
) -> Params:
    shardings: dict[str, Any] = traverse_util.flatten_dict(  # pyright: ignore[reportAssignmentType]
        layout.tree(model.specs), sep="/"
    )
    _, params = load(path, dtype=dtype, put=lambda name, array: place(array, shardings[name]))
    return params


def trained_specs(config: LoraConfig, specs: Specs) -> Any:
    """Returns the specs of the learner's parameters: the model's, or `lora.Adapted`.

    Raises:
      ValueError: if one of lora.targets matches nothing.
    """
    if not config.rank:
        return specs
    adapters = lora.adapter_specs(specs, rank=config.rank, targets=config.targets)
    return lora.Adapted(adapters, specs, config.alpha)


def load_trained(config: Config, *, layout: Layout) -> tuple[Model, Any, Any]:
    """Loads the model of a run; returns it with the learner's parameters and their specs.

    Without lora, all parameters are in `precision.params`; with it, adapters are, and the frozen
    parameters are in `precision.wire`.

    Raises:
      FileNotFoundError, ValueError: as `load_model`, `trained_specs` and `peft.load`.
    """
    c, policy = config.lora, config.policy
    dtype = policy.wire if c.rank else policy.params
    model, params = load_model(
        config.model.path,
        layout=layout,
        dtype=dtype,
        remat=config.train.remat,
        attention=config.train.attention,
    )
    specs = trained_specs(c, model.specs)
    if not isinstance(specs, lora.Adapted):
        return model, params, specs
    if c.path is not None:
        adapters = peft.load(c.path, specs, dtype=policy.params)
    else:
        adapters = spec.init(specs.adapters, jax.random.key(config.seed), dtype=policy.params)
    adapters = place(adapters, layout.tree(specs.adapters))
    return model, lora.Adapted(adapters, params, specs.alpha), specs
