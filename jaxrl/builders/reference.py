"""Opens the reference of a run where it is not beside the policy: on devices of its own, or on a
server."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import jax
import numpy as np

from jaxrl.bridge import ControlError
from jaxrl.builders.apart import Apart
from jaxrl.builders.model import make_decoder
from jaxrl.builders.served_model import ask_scorer, connect_scorer
from jaxrl.config.training import Config
from jaxrl.core import Hosts, Minibatch, MinibatchShape, Rollout, jit, pack_minibatch
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import make_score
from jaxrl.models import Model, lora
from jaxrl.sharding import place

ScoreApart = Callable[[Sequence[Rollout], Minibatch], jax.Array]
"""(rollouts, the same packed) -> the reference's log-probs, f32[N, T], on the policy's devices."""


def place_reference(
    config: Config, model: Model, *, params: Any, specs: Any, apart: Apart
) -> ScoreApart:
    """Copies the initial model to devices of its own, in `precision.compute`, with its frozen
    parameters if adapters are trained. `model` is the policy's."""
    decoder = make_decoder(
        model.config, layout=apart.layout, remat="none", attention=config.train.attention
    )
    score = make_score(
        decoder._replace(temperature=config.sampling.temperature),
        precision=config.precision,
        param_shardings=apart.layout.constraints(specs),
    )
    trained = jit(lora.as_reference, static_argnums=1)(params, config.precision)
    initial = place(lora.with_trainable(params, trained), apart.layout.tree(specs))
    compiled = functools.partial(jit(score, sums=config.precision.sums), initial)
    return lambda rollouts, minibatch: apart.bring(compiled(apart.send(minibatch)))


@contextmanager
def connect_reference(
    config: Config, policy: Checkpoint, *, shape: MinibatchShape, hosts: Hosts
) -> Iterator[ScoreApart]:
    """Opens the client of `reference.server` for the block; process 0 asks it.

    Raises:
      ValueError: for a server that cannot be used; the message names the key.
      ControlError: in a call, if the server leaves out a token.
    """
    key, url = "reference.server", config.reference.server
    assert url is not None

    def score(rollouts: Sequence[Rollout], minibatch: Minibatch) -> jax.Array:
        found = hosts.on_leader(lambda: ask_scorer(client, rollouts))
        if missing := sum(int(np.isnan(one).sum()) for one in found):
            raise ControlError(
                f"{key} = {url!r} reported no log-prob for {missing} tokens; see its log"
            )
        rows = dataclasses.replace(shape, max_rows=minibatch.batch.tokens.shape[0])
        return pack_minibatch(rollouts, found, shape=rows).batch.advantages

    with closing(connect_scorer(config, policy, key=key, url=url)) as client:
        yield score
