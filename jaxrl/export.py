"""From a training run's checkpoint to a Hugging Face model."""

from pathlib import Path

import jax

from jaxrl import parts, precision
from jaxrl.checkpoint import CheckpointError, Checkpoints
from jaxrl.config import Config
from jaxrl.learner import LearnerState, make_learner
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.algebra import objective
from jaxrl.losses.surrogates import reinforce
from jaxrl.mesh_config import MeshConfig
from jaxrl.models import huggingface, spec
from jaxrl.models.decoder import Model, decoder
from jaxrl.precision import Precision


def export_checkpoint(
    config: Config, *, run_dir: Path, directory: Path, step: str, dtype: str | None
) -> int:
    """Writes the policy of a checkpoint; config.json's sizes and the tokenizer are those of the
    model that the run began with, which must still exist.

    Args:
      config: of the run.
      run_dir: where the run lies now.
      directory: where the model is written.
      step: "latest", "best" or a number.
      dtype: what the tensors are cast to, such as "f32"; None for the policy's wire dtype.

    Returns:
      The step of the checkpoint.

    Raises:
      CheckpointError: if there is no such checkpoint, or it cannot be read.
      ValueError: for another `step`, or an unknown dtype.
    """
    policy = precision.parse(config.precision)
    wire = policy.wire if dtype is None else precision.parse(f"fp32,wire={dtype}").wire
    checkpoints = Checkpoints.reading(run_dir / "checkpoints")
    chosen = _choose(checkpoints, step)
    model = decoder(huggingface.load_config(config.model.path))
    state = checkpoints.restore(chosen, _like(config, model, policy)).state
    huggingface.save(
        directory, state.params, model.config, dtype=wire, source_dir=config.model.path
    )
    return chosen


def _choose(checkpoints: Checkpoints, step: str) -> int:
    named = {"latest": checkpoints.latest_step, "best": checkpoints.best_step}
    if step in named:
        found = named[step]()
        if found is None:
            raise CheckpointError(f"{checkpoints.directory} holds no {step} checkpoint")
        return found
    if not step.isdecimal():
        raise ValueError(f"--step {step!r}: expected latest, best or a number")
    return int(step)


def _like(config: Config, model: Model, policy: Precision) -> LearnerState:
    """The structure of the run's state, on one device."""
    layout = parts.make_layout(MeshConfig())
    learner = make_learner(
        model,
        objective(reinforce(), token_mean),  # any: the state does not depend on it
        optimizer=parts.make_optimizer(
            config.optimizer, total_steps=config.optimizer_steps, specs=model.specs
        ).transformation,
        precision=policy,
        rows_per_microbatch=1,
    )
    state = jax.eval_shape(learner.init, spec.abstract(model.specs, dtype=policy.params))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        layout.state(state, model.specs),
    )
