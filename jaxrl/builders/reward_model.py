"""The reward model of a run, as its config says."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl.builders import parts
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.core.batch import Rollout
from jaxrl.data.prompts import Tokenizer
from jaxrl.learner.reward_model import RewardModel, check_vocabulary, make_scores, rate
from jaxrl.models import huggingface
from sharding.partition import Layout

Judge = Callable[[Sequence[Rollout]], np.ndarray]
"""Rollouts -> what each is worth, f64[N]."""


def load_judge(config: Config, path: str, tokenizer: Tokenizer, *, layout: Layout) -> Judge:
    """What the reward model of a run thinks of rollouts, computed on the learner's devices in
    `precision.compute`.

    Args:
      config: of the run; rows and microbatches are those of its learner.
      path: the reward model's directory.
      tokenizer: the policy's.
      layout: of the learner.

    Raises:
      ValueError: if it is no reward model, or its token ids mean something else; the message says
        what differs.
    """
    if not huggingface.load_config(path).scored:
        raise ValueError(
            f"reward.model = {path!r} is a language model, which scores nothing; make a reward "
            "model of it with jaxrl reward-model"
        )
    policy = precision.parse(config.precision)
    model, params = parts.load_scorer(path, layout=layout, dtype=policy.compute)
    check_vocabulary(
        path,
        own=huggingface.load_tokenizer(path),
        policy=tokenizer,
        vocab_size=model.config.vocab_size,
    )
    scores = make_scores(
        model,
        precision=policy,
        rows_per_microbatch=config.microbatch_rows,
        param_shardings=layout.tree(model.specs) if layout.mesh.size > 1 else None,
    )
    judge = RewardModel(
        params=params,
        scores=jax.jit(scores),
        sharding=layout.batch(("batch", "length")),
        row_length=config.row_length,
        rows_per_microbatch=config.microbatch_rows,
    )
    return functools.partial(rate, judge)
