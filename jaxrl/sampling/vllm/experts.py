"""Experts that vLLM's layers chose, as its responses carry them (`--enable-return-routed-experts`).

A choice has `routed_experts`: base64 of a .npy file, [P + C - 1, L, k] unsigned, for the tokens of
prompt and completion without the last, which was never run through the model.
"""

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.sampling.vllm.router import SamplerError

FLAG = "--enable-return-routed-experts"


def read_experts(
    choice: Mapping[str, Any], before: np.ndarray | None, *, tokens: int, layers: int
) -> np.ndarray | None:
    """Reads the experts of a choice whose prompt and completion have `tokens` token ids, in the
    last `layers` of the model: the first ones may be dense, and are reported, too.

    `before` are those of the part that it continues: they drew its tokens, and the server has
    computed that part again with newer weights. None if nothing was run.

    Raises:
      SamplerError: if the server did not record them, or not those of all tokens.
    """
    text = choice.get("routed_experts")
    if text is None and not choice["token_ids"]:
        return before
    if text is None:
        raise SamplerError(
            "the server reports no experts, which train.replay_routing needs: start it with "
            f"--vllm_args '[\"{FLAG}\"]' and VLLM_USE_V2_MODEL_RUNNER=1, or leave "
            "train.replay_routing out"
        )
    found = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if found.ndim != 3 or len(found) != tokens - 1 or found.shape[1] < layers:
        raise SamplerError(
            f"the server reports experts of shape {list(found.shape)} for {tokens} tokens; "
            f"expected [{tokens - 1}, layers, experts per token] with at least {layers} layers"
        )
    found = found[:, -layers:]
    return found if before is None else np.concatenate([before, found[len(before) :]])
