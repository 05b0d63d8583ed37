"""Conversion of checkpoints to Hugging Face models and PEFT adapters."""

from pathlib import Path
from typing import Any

import jax

from jaxrl import huggingface
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import find_trained, trained_specs
from jaxrl.builders.optimizer import make_optimizer
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.preference import RewardModelConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import Precision
from jaxrl.huggingface import save_adapter
from jaxrl.learner import CheckpointError, Checkpoints, LearnerState, checkpoint_view, make_update
from jaxrl.models import decoder, lora
from jaxrl.sharding import placed
from jaxrl.training.export import model_dtype


def export_checkpoint(
    config: Config | SupervisedConfig,
    *,
    run_dir: Path,
    directory: Path,
    step: str,
    dtype: str | None = None,
    blocks: str = "none",
    only_adapters: bool = False,
) -> int:
    """Writes a checkpoint's model with adapters merged, or the adapters alone in PEFT's format.

    The run's initial model must still exist: config.json, the tokenizer and the weights below the
    adapters come from there.

    `step` is "latest", "best" or a number. `dtype` is the dtype of the tensors, such as "f32"; by
    default `model_dtype`, and for the adapters alone the trained dtype, which is lossless. `blocks`
    is the form of the layers' matrices, as in `huggingface.save`. Returns the checkpoint's step.

    Raises:
      CheckpointError: if there is no such checkpoint, or it is unreadable.
      ValueError: for any other `step`, an unknown dtype, `blocks` that do not fit the model, or
        `only_adapters` with them or without any adapters.
    """
    if only_adapters and blocks != "none":
        raise ValueError("--adapter writes no matrices in 8 bits; leave out --blocks")
    directories = run_dir / "checkpoints"
    if not any(one.name.isdecimal() for one in directories.glob("*")):
        raise CheckpointError(
            f"{run_dir} has no checkpoint yet, so there is nothing to export: a run saves one "
            "every checkpoint.every steps, at its end and at Ctrl-C. Rerun the command that "
            "started it"
        )
    base, precision = find_trained(config), config.precision
    written = precision.params if only_adapters else model_dtype(config, base)
    if dtype is not None:
        try:
            written = Precision.parse(f"fp32,wire={dtype}").wire
        except ValueError:
            raise ValueError(f"--dtype {dtype!r}: expected f32, bf16 or f16") from None
    found = base.config
    if isinstance(config, RewardModelConfig):
        found = base.scorer_config
    model = decoder(found)
    if blocks != "none":
        model.config.check_blocks(blocks)  # before a checkpoint is read
    specs = trained_specs(config.lora, model.specs)
    adapted = isinstance(specs, lora.Adapted)
    if only_adapters and not adapted:
        raise ValueError(f"{run_dir} has no adapters (lora.rank = 0); leave out --adapter")
    checkpoints = Checkpoints.reading(directories)
    chosen = _resolve_step(checkpoints, step)
    like = checkpoint_view(_like(config, specs=specs))
    params = checkpoints.restore(chosen, like).state.params
    if only_adapters:
        save_adapter(directory, params, specs=specs, base=str(base.directory), dtype=written)
        return chosen
    if adapted:
        frozen = base.load(dtype=precision.wire, scored=model.config.scored)
        params = lora.merge(lora.Adapted(params, frozen, specs.alpha))
    huggingface.save(directory, params, model.config, dtype=written, source=base, blocks=blocks)
    return chosen


def _resolve_step(checkpoints: Checkpoints, step: str) -> int:
    named = {"latest": checkpoints.latest_step, "best": checkpoints.best_step}
    if step in named:
        found = named[step]()
        if found is None:
            raise CheckpointError(
                f"{checkpoints.directory} has no {step} checkpoint: none was measured on held-out "
                "data, which data.eval_path names; use --step latest, or a number"
            )
        return found
    if not step.isdecimal():
        raise ValueError(f"--step {step!r}: expected latest, best or a number")
    return int(step)


def _like(config: Config | SupervisedConfig, *, specs: Any) -> LearnerState:
    """Builds the abstract state that a checkpoint is restored into, on one device."""
    layout = make_layout(MeshConfig())
    optimizer = make_optimizer(
        config.optimizer,
        total_steps=config.train.steps,  # any; the state does not depend on it
        specs=specs,
    ).transformation
    update = make_update(optimizer=optimizer, precision=config.precision)
    params = lora.abstract(specs, trained=config.precision.params, kept=config.precision.wire)
    state = jax.eval_shape(update.init, params)
    return placed(state, layout.state(state, lora.declared(specs)))
