"""The tokens that a vLLM server's truncated sampling kept, as records of `core.kept`."""

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.core.kept import encode, most_kept
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.vllm.router import SamplerError


def read_kept(
    choice: Mapping[str, Any], logprobs: list[float], params: SamplingParams, *, vocab_size: int
) -> tuple[np.ndarray | None, list[float]]:
    """Reads `sampling_mask` of a choice: for each token the ids that survived truncation.

    Returns:
      u8[C, 32] records, None for a greedy or whole distribution; and the log-probs of the tokens.
      They are NaN where a set has more ids than a record, because tokens tie with the last one: the
      record is then of the drawn token alone, so it has no gradient. They are NaN for all greedy
      tokens, which such a server draws with `top_k` = 1, hence with log-probs of 0.

    Raises:
      SamplerError: if the server did not report the ids of all tokens.
    """
    tokens = choice["token_ids"] or []
    if params.temperature == 0:
        return None, [math.nan] * len(tokens)
    if not params.truncated:
        return None, logprobs
    sets = choice.get("sampling_mask")
    if sets is None and tokens:
        raise SamplerError(
            "the server does not report the tokens that sampling.top_p, top_k or min_p keeps: "
            "start it with --vllm_args '[\"--return-sampling-mask\"]' and "
            "VLLM_USE_V2_MODEL_RUNNER=1, on a GPU, or leave these keys out"
        )
    sets = sets or []
    if len(sets) != len(tokens) or not all(map(operator.contains, sets, tokens)):
        raise SamplerError(
            f"the server reports {len(sets)} sets of kept tokens for {len(tokens)} tokens; "
            "expected one for each, with the token in it"
        )
    most, ids = most_kept(vocab_size), np.zeros((len(tokens), most_kept(vocab_size)), np.int32)
    found = list(logprobs)
    for i, (kept, token) in enumerate(zip(sets, tokens, strict=True)):
        if len(kept) > most:
            kept, found[i] = [token], math.nan
        ids[i] = [*kept, *[token] * (most - len(kept))]
    return encode(ids, vocab_size), found
