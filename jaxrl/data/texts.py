"""Completions from a data set: tokens to train on that no sampler produced."""

from collections.abc import Sequence

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data import prompts


def given_rollout(prompt: Sequence[int], completion: Sequence[int]) -> Rollout:
    """Returns a rollout of given token ids: all are actions, and their log-probs are NaN."""
    size = len(completion)
    return Rollout(
        prompt=np.asarray(prompt, np.int32),
        completion=np.asarray(completion, np.int32),
        logprobs=np.full(size, np.nan, np.float32),
        action_mask=np.ones(size, bool),
        version=np.zeros(size, np.int32),
        group=0,
    )


def end_token(tokenizer: prompts.Tokenizer) -> int:
    """Returns the id of the end-of-sequence token.

    Raises:
      ValueError: if the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token; set eos_token in its config")
    return tokenizer.eos_token_id
