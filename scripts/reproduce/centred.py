"""GRPO without ratio, clip or mask, with the drift of the sampler removed (score centering)."""

from jaxrl.losses import Ratio, Recipe, grpo, on_policy, score_centering


def centred(*, ratio: Ratio = on_policy) -> Recipe:
    """Adds score centering to GRPO with a ratio of 1."""
    return grpo(ratio=ratio) + score_centering()
