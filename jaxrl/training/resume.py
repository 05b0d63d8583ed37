"""Saves and restores the learner's state and the progress of a run."""

import functools

from jaxrl.core import Precision
from jaxrl.learner import (
    CheckpointError,
    Checkpoints,
    State,
    checkpoint_view,
    from_checkpoint,
    with_new_loss_scale,
)
from jaxrl.training.fork import Fork
from jaxrl.training.progress import Progress

# Roles and settings that decide the log-probs of what the sampler writes.
_SAMPLED = ("wire", "sampler", "logits", "products", "sums", "latent", "blocks")


def restore(
    checkpoints: Checkpoints,
    state: State,
    *,
    precision: Precision,
    batch: int,
    fork: Fork | None = None,
) -> tuple[State, Progress]:
    """Reads the last checkpoint; without one, returns `state` and no progress.

    Of a run that begins as a fork, it reads the checkpoint of the other run, and saves it here.
    A step trains on `batch` prompts.
    """
    progress = Progress()
    read = None if fork is None else fork.read
    if (step := checkpoints.latest_step()) is not None:
        read = functools.partial(checkpoints.restore, step)
    if read is not None:
        found = read(checkpoint_view(state.policy), critic=state.critic)
        state = State(from_checkpoint(found.state, like=state.policy), found.critic)
        try:
            progress = Progress.from_json(found.host)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {checkpoints.directory}/{step}: its host/metadata does not hold the "
                f"position of a run: {error!r}"
            ) from error
        if fork is not None:
            fork.adapt(progress, batch=batch)
        state = adapt_precision(state, progress, precision=precision)
    progress.precision = str(precision)
    if fork is not None:
        save(checkpoints, state, progress=progress)
        checkpoints.wait()
    return state, progress


def adapt_precision(state: State, progress: Progress, *, precision: Precision) -> State:
    """Adapts a restored run to a new precision: resets the loss scale, and drops pending
    rollouts if the sampler computes otherwise now."""
    if progress.precision is None or progress.precision == str(precision):
        return state
    before = Precision.parse(progress.precision)
    if any(getattr(before, name) != getattr(precision, name) for name in _SAMPLED):
        progress.drop_pending()
    return with_new_loss_scale(state, precision)


def save(
    checkpoints: Checkpoints, state: State, *, progress: Progress, metric: float | None = None
) -> None:
    """Saves a checkpoint unless this step has one."""
    if progress.step > (checkpoints.latest_step() or 0):
        checkpoints.save(
            progress.step,
            checkpoint_view(state.policy),
            host=progress.to_json(),
            critic=state.critic,
            metric=metric,
        )
