"""Tells from the log-probs that a vLLM server reports whether its head rounds logits."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.bridge import ServerRoutes
from jaxrl.models import DecoderConfig

_PROMPTS, _GROUP, _TOKENS = 4, 4, 32  # sampled for it
_SMALLEST_LOGIT = 2**-4  # the spacing of rounded logits is known above it
_LOGPROB_ERROR = 4e-6  # nats, of a difference of two log-probs in f32
_GAPS = 16  # that are needed to tell how the head computes


def sampled_gaps(
    server: ServerRoutes, sizes: DecoderConfig, *, model: str, longest: int
) -> list[float]:
    """Asks a server for gaps of log-probs of 512 tokens, as `ServerRoutes.logprob_gaps`. `longest`
    is the longest sequence that it takes. Raises ControlError if it does not answer."""
    prompts = np.random.default_rng(0).integers(0, sizes.vocab_size, (_PROMPTS, 1)).tolist()
    tokens = min(_TOKENS, longest - 1)
    return server.logprob_gaps(prompts, model=model, tokens=tokens, n=_GROUP)


def rounds_logits(gaps: Sequence[float], *, dtype: np.dtype) -> bool | None:
    """Tells whether a head rounds its logits to `dtype`, from differences of logits of one
    position, in nats; None if too few of them differ from 0.

    Rounded logits above 1/16 are multiples of a power of two, and so are their differences. Other
    differences are within the error of f32 log-probs of such a multiple by chance, 2 % of them
    for bf16 and 13 % for f16. No model is needed to tell, and engines of any order of sums pass.

    Example:
      >>> rounds_logits([0.25, 3.34375, 0.78125, 1.015625] * 4, dtype=jnp.bfloat16)
      True
      >>> rounds_logits([0.2512, 3.3419, 0.7802, 1.0161] * 4, dtype=jnp.bfloat16)
      False
    """
    given = np.asarray(gaps, np.float64)
    given = given[given > 0]
    if len(given) < _GAPS:
        return None
    spacing = _SMALLEST_LOGIT * float(jnp.finfo(dtype).eps)
    off = np.abs(given - spacing * np.round(given / spacing))
    return float((off < _LOGPROB_ERROR).mean()) > 0.5
