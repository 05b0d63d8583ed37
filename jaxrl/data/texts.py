"""Given completions: token ids to learn from that no sampler produced."""

from collections.abc import Sequence

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data import prompts


def answered(prompt: Sequence[int], completion: Sequence[int]) -> Rollout:
    """A given answer to a prompt, all of which is learnt; both are token ids."""
    size = len(completion)
    return Rollout(
        prompt=np.asarray(prompt, np.int32),
        completion=np.asarray(completion, np.int32),
        logprobs=np.full(size, np.nan, np.float32),
        action_mask=np.ones(size, bool),
        version=np.zeros(size, np.int32),
        group=0,
    )


def end_of(tokenizer: prompts.Tokenizer) -> int:
    """The token that ends a text.

    Raises:
      ValueError: if the tokenizer names none.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the model's tokenizer has no end-of-sequence token, so no text could end")
    return tokenizer.eos_token_id
