"""The `[probe]` table of a config."""

from pydantic import NonNegativeInt

from jaxrl.config.section import ClipRange, Section


class ProbeConfig(Section):
    """The split of the log-ratio into alpha, the policy's change, and beta, rounding; see
    docs/precision.md. Its metrics are `probe/...`."""

    every: NonNegativeInt = 10
    """Probe the first mini-batch every this many steps, which costs two forward passes; 0 never
    probes."""

    replay: bool = False
    """Have the vLLM server score the same tokens, which splits beta into dtype and engine; needs
    sampler.name = 'vllm' and a temperature of 1."""

    clip_range: ClipRange = (0.2, 0.2)
    """[low, high]: tokens count as clipped below a ratio of 1 - low and above 1 + high."""
