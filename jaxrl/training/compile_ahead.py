"""Compiles the learner's programs in threads, beside the sampling of the first rollouts.

Compiling takes seconds on a CPU and minutes for a large model, and needs shapes alone. The first
call of a compiled function then finds its program in JAX's cache.
"""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxrl.builders.learner import Learning
from jaxrl.config.training import Config
from jaxrl.core import Minibatch, MinibatchShape, given_rollout, pack_minibatch
from jaxrl.diagnostics import longer_rows
from jaxrl.learner import State
from jaxrl.losses import Need
from jaxrl.models import lora
from jaxrl.sharding import placed
from jaxrl.training.minibatches import with_coefficients
from jaxrl.training.timing import is_due


@contextmanager
def compile_ahead(
    config: Config, learning: Learning, state: State, *, step: int
) -> Iterator[Callable[[], None]]:
    """Compiles what the learner runs in the first step after `step`, if there is one.

    Yields:
      A function that waits until the programs are compiled. It raises what the compiler raised.
    """
    # A GPU's compiler measures kernels on the device, which must have nothing else to do.
    measured = learning.layout.mesh.devices.flat[0].platform == "gpu"
    parts = () if measured or step == config.train.steps else (_compile_update, _compile_probe)
    # It waits at its end: Python must not end in the middle of the compiler.
    with ThreadPoolExecutor(len(parts) or 1, thread_name_prefix="compile-ahead") as threads:
        compiling = [threads.submit(part, config, learning, state, step=step) for part in parts]

        def wait() -> None:
            for program in compiling:
                program.result()

        yield wait


def _compile_update(config: Config, learning: Learning, state: State, *, step: int) -> None:
    """Compiles the scores of a minibatch and its update."""
    learner, policy, needs = learning.learner, state.policy, learning.recipe.objective.needs
    minibatch, scores = _example(config, learning, learning.shape), dict[str, Any]()
    if learning.critic is not None:
        _compile(learning.critic.values, state, minibatch)
        minibatch = _with_arrays(minibatch, "values", "returns")
    if Need.REFERENCE in needs:
        reference = lora.with_trainable(policy.params, learning.reference)
        scores["reference"] = _compile(learner.score, reference, minibatch)
    if Need.ANCHOR in needs and config.train.updates_per_rollout > 1:
        scores["anchor"] = _compile(learner.score, policy.params, minibatch)
    if is_due(config.probe.every, step):
        _compile(learner.score, policy.params, minibatch)
    if learning.recipe.controllers:
        minibatch = with_coefficients(minibatch, dict.fromkeys(learning.recipe.controllers, 0.0))
    minibatch = dataclasses.replace(minibatch, **scores)
    if learning.critic is None:
        _compile(learner.step, policy, minibatch)
    elif step < config.critic.pretrain_steps:
        _compile(learning.critic.pretrain, state, minibatch)
    else:
        _compile(learning.critic.step, state, minibatch)


def _compile_probe(config: Config, learning: Learning, state: State, *, step: int) -> None:
    """Compiles what only the probe of a minibatch runs."""
    learner, params = learning.learner, state.policy.params
    if is_due(config.probe.every, step):
        minibatch = _example(config, learning, learning.shape)
        if learning.critic is not None:
            minibatch = _with_arrays(minibatch, "values", "returns")
        _compile(learner.shadow_scores, params, minibatch)
        if step == 0:
            again = _example(config, learning, longer_rows(learning.shape))
            _compile(learner.score, params, again)


def _compile(program: Any, *args: Any) -> Any:
    """Compiles a program for these arguments; returns its results' shapes, with shardings. It
    costs nothing if the program exists."""
    lowered = program.lower(*args)
    return placed(lowered.out_info, lowered.compile().output_shardings)


def _example(config: Config, learning: Learning, shape: MinibatchShape) -> Minibatch:
    """Packs a minibatch of one token: every minibatch of this shape has its arrays."""
    rollout = given_rollout([0], [0])
    if config.train.replay_routing and (experts := learning.model.config.experts) is not None:
        layers = learning.model.config.routed_layers
        routed = np.zeros((1, layers, experts.per_token), np.int16)
        rollout = rollout._replace(experts=routed)
    return pack_minibatch([rollout], [0.0], shape=shape)


def _with_arrays(minibatch: Minibatch, *names: str) -> Minibatch:
    """Adds arrays of the batch that are shaped and placed like its advantages."""
    like = minibatch.batch.advantages
    added = placed(like, like.sharding)
    batch = dataclasses.replace(minibatch.batch, **dict.fromkeys(names, added))
    return dataclasses.replace(minibatch, batch=batch)
