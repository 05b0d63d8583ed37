"""The `[reference]` table of a config."""

from collections.abc import Iterator

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
