"""The `[reference]` table of a config."""

from collections.abc import Iterator

from jaxrl.config.sampler import SamplingConfig
from jaxrl.config.section import Section, is_http_address


class ReferenceConfig(Section):
    """The reference, with which loss.kl and reward.kl compare: the initial model."""

    server: str | None = None
    """Address of a vLLM server of the initial model, such as http://127.0.0.1:8001, which then
    scores the completions of every step. If absent, the learner keeps a copy of the initial
    weights."""

    def _contradictions(self) -> Iterator[str]:
        if self.server is not None and not is_http_address(self.server):
            yield (
                f"reference.server = {self.server!r} is not the address of a server; expected "
                "http://HOST:PORT"
            )

    def conflicts(self, sampling: SamplingConfig) -> Iterator[str]:
        """Yields one line for each contradiction with the sampling parameters, with the fix."""
        if self.server is not None and sampling.temperature != 1:
            yield (
                f"reference.server = {self.server!r} and sampling.temperature = "
                f"{sampling.temperature:g}: vLLM scores given tokens only at a temperature of 1; "
                "leave one of the two out"
            )
        if self.server is not None and sampling.truncated:
            yield (
                f"reference.server = {self.server!r} and sampling.top_p, top_k or min_p: vLLM "
                "scores given tokens only over the whole vocabulary; leave one of the two out"
            )
