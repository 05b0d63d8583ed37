"""Opens the teacher that a config names: a language model that judges each token of a completion.

On-policy distillation: the policy samples, and the advantage of each of its tokens gains
log teacher - log sampler, minus an estimate of the reverse KL (Thinking Machines, "On-Policy
Distillation", 2025; GKD, arXiv:2306.13649).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import jax
import numpy as np

from jaxrl.builders.layout import own_layout
from jaxrl.builders.model import ModelFiles
from jaxrl.builders.reward_model import load_scorer
from jaxrl.builders.rows import minibatch_shape
from jaxrl.builders.served_model import ask_scorer, connect_scorer, serves_scores
from jaxrl.config.training import Config
from jaxrl.core import Hosts, Minibatch, MinibatchShape, Rollout, jit, pack_minibatch, unpack
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import make_score
from jaxrl.sampling import VllmScorer
from jaxrl.sharding import Layout, fetch

Teacher = Callable[[Sequence[Rollout]], Sequence[np.ndarray]]
"""Rollouts -> f32[C] for each, log-probs of its completion; NaN where there is none."""


def names_teacher(config: Config, models: ModelFiles, *, hosts: Hosts) -> bool:
    """Tells if reward.model is a language model, not a reward model. Process 0 asks a server; all
    must call it.

    Raises:
      ValueError: for a server that does not answer.
    """
    if config.reward.model_url:
        return not hosts.on_leader(lambda: serves_scores(config))
    return models.scorer is not None and not models.scorer.config.scored


def check_teacher(config: Config) -> None:
    """Checks the keys that go with a teacher in reward.model.

    Raises:
      ValueError: if dynamic sampling would drop every group, because nothing else rewards.
    """
    rounds, rewarded = config.train.dynamic_sampling_rounds, any(config.reward.function_weights)
    rewarded |= bool(config.reward.path) and not config.reward.weights
    if rounds and not rewarded and config.environment.name is None:
        raise ValueError(
            f"train.dynamic_sampling_rounds = {rounds} drops groups with equal rewards, and all "
            f"are equal: reward.model = {config.reward.model!r} is a teacher, and no function of "
            "reward.path counts; set train.dynamic_sampling_rounds to 0"
        )


@contextmanager
def open_teacher(
    config: Config, models: ModelFiles, *, layout: Layout, hosts: Hosts
) -> Iterator[Teacher | None]:
    """Opens the teacher of a run that `names_teacher`. Process 0 asks a server, and the others get
    None; a model in a directory runs on the learner's devices.

    Raises:
      ValueError: for a model or a server that cannot be used; the message names the key.
    """
    if not config.reward.model_url:
        yield hosts.on_all(_load_teacher(config, models, layout=layout))
    elif hosts.leads:
        with closing(_connect(config, models.policy)) as client:
            yield functools.partial(ask_scorer, client)
    else:
        yield None


def _load_teacher(config: Config, models: ModelFiles, *, layout: Layout) -> Teacher:
    """Loads a teacher in `precision.compute`; rows and microbatches are the learner's."""
    layout = own_layout(config, "reward_mesh", shared=layout)
    model, params = load_scorer(config, models, layout=layout, output="tokens")
    model = model._replace(temperature=config.sampling.temperature)
    shardings = layout.constraints(model.specs)
    score = make_score(model, precision=config.precision, param_shardings=shardings)
    # Sized for the worst case, one sequence per row, so that it compiles once.
    shape = minibatch_shape(config, layout, max_rows=config.minibatch_completions)
    compiled = functools.partial(jit(score, sums=config.precision.sums), params)
    return functools.partial(score_completions, score=compiled, shape=shape)


def score_completions(
    rollouts: Sequence[Rollout], *, score: Callable[[Minibatch], jax.Array], shape: MinibatchShape
) -> list[np.ndarray]:
    """Scores completions with a compiled model: f32[C] for each, 0 where the policy did not choose
    the token."""
    # A teacher does not have the policy's experts, and judges as a server does: by its whole
    # distribution.
    rollouts = [r._replace(experts=None, kept=None) for r in rollouts]
    most, found = shape.max_rows or len(rollouts), list[np.ndarray]()
    for first in range(0, len(rollouts), most):
        some = rollouts[first : first + most]
        minibatch = pack_minibatch(some, [0.0] * len(some), shape=shape)
        found += unpack(fetch(score(minibatch)), some, shape=shape)
    return found


def _connect(config: Config, policy: Checkpoint) -> VllmScorer:
    key, url = "reward.model", config.reward.model
    assert url is not None
    if config.sampling.temperature != 1:
        raise ValueError(
            f"{key} = {url!r} and sampling.temperature = {config.sampling.temperature:g}: vLLM "
            "scores given tokens only at a temperature of 1; set it to 1, or give the teacher's "
            "directory"
        )
    return connect_scorer(config, policy, key=key, url=url)
