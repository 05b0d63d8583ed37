"""Compiles the learner's programs in threads, while the first rollouts are sampled.

Compiling takes seconds on a CPU and minutes for a large model, and needs only shapes. The first
call of a compiled function then finds its program in JAX's cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from jaxrl.builders.learner import Learning, given_scores, recorded_experts
from jaxrl.config.training import Config
from jaxrl.core import Minibatch, abstract_minibatch
from jaxrl.diagnostics import longer_rows
from jaxrl.learner import State
from jaxrl.sharding import placed
from jaxrl.training.timing import is_due


@contextmanager
def compile_ahead(
    config: Config, learning: Learning, state: State, *, step: int
) -> Iterator[Callable[[], None]]:
    """Compiles the learner's programs for the first step after `step`, if there is one.

    Yields:
      A function that waits until the programs are compiled, and raises the compiler's errors.
    """
    # A GPU's compiler times kernels on the device, which must be idle.
    measured = learning.layout.mesh.devices.flat[0].platform == "gpu"
    parts = () if measured or step == config.train.steps else (_compile_update, _compile_probe)
    # The block waits for the threads: Python must not exit while one compiles.
    with ThreadPoolExecutor(len(parts) or 1, thread_name_prefix="compile-ahead") as threads:
        compiling = [threads.submit(part, config, learning, state, step=step) for part in parts]

        def wait() -> None:
            for program in compiling:
                program.result()

        yield wait


def _compile_update(config: Config, learning: Learning, state: State, *, step: int) -> None:
    """Compiles the scores of a minibatch and its update."""
    score, policy, critic = learning.learner.score, state.policy, learning.critic
    described = _described(config, learning)
    critic_apart = "critic" in learning.apart  # compiled at its first call, as all models apart
    if critic is not None and not critic_apart:
        _compile(critic.values, state, described(critic=False))
    minibatch = described()
    if is_due(config.probe.every, step):
        _compile(score, policy.params, minibatch)
    names = given_scores(learning.recipe, updates=config.train.updates_per_rollout)
    theirs = {"reference"} & {*names} if learning.reference_apart is not None else set()
    scores: dict[str, Any] = {
        name: _compile(score, learning.weights_of(name, policy.params), minibatch)
        for name in names
        if name not in theirs
    }
    minibatch = described(coefficients=learning.recipe.controllers, scores=theirs)
    minibatch = dataclasses.replace(minibatch, **scores)  # sharded as the compiler chose
    if critic_apart:
        if step >= config.critic.pretrain_steps:
            _compile(learning.learner.step, policy, minibatch)
    elif critic is None:
        _compile(learning.learner.step, policy, minibatch)
    elif step < config.critic.pretrain_steps:
        _compile(critic.pretrain, state, minibatch)
    else:
        _compile(critic.step, state, minibatch)


def _compile_probe(config: Config, learning: Learning, state: State, *, step: int) -> None:
    """Compiles the programs that only the probe of a minibatch runs."""
    learner, params = learning.learner, state.policy.params
    if is_due(config.probe.every, step):
        described = _described(config, learning)
        _compile(learner.shadow_scores, params, described())
        if step == 0:
            again = described(shape=longer_rows(learning.shape), critic=False)
            _compile(learner.score, params, again)


def _described(config: Config, learning: Learning) -> Callable[..., Minibatch]:
    """Returns `abstract_minibatch` with the arguments of a run, which keywords override."""
    return functools.partial(
        abstract_minibatch,
        shape=learning.shape,
        critic=learning.critic is not None,
        experts=recorded_experts(config, learning.model.config),
        kept=config.sampling.truncated,
    )


def _compile(program: Any, *args: Any) -> Any:
    """Compiles a program for these arguments; returns the shapes and shardings of its results."""
    lowered = program.lower(*args)
    return placed(lowered.out_info, lowered.compile().output_shardings)
