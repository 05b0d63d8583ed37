"""The `[probe]` table of a config."""

from pydantic import NonNegativeInt

from jaxrl.config.section import ClipRange, Section


class ProbeConfig(Section):
    """The split of the log-ratio into alpha (policy change) and beta (rounding), logged as
    `probe/...`; see docs/precision.md."""

    every: NonNegativeInt = 10
    """Probe the first mini-batch every this many steps (two forward passes); 0 never probes."""

    replay: bool = False
    """Let the vLLM server score the same tokens, which splits beta into dtype and engine; needs
    sampler.name = 'vllm' and a temperature of 1."""

    clip_range: ClipRange = (0.2, 0.2)
