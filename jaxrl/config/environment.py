"""The `[environment]` table of a config."""

from collections.abc import Iterator

from pydantic import PositiveInt

from jaxrl.config.section import OpenSection, Seconds, Texts


class EnvironmentConfig(OpenSection):
    """The environment of multi-turn episodes; further keys of this table are its arguments."""

    name: str | None = None
    """An environment in jaxrl.environments.builtin (`agent` lets the policy call tools, `text_game`
    plays a text game, `gateway` runs an agent that talks to OpenAI's or Anthropic's API, `openenv`
    and `verifiers` play those libraries' environments), `file.py:Class` or `package.module:Class`.
    Without one, every rollout is a single turn."""

    tools: Texts = ()
    """Tools that the policy can call: `calculator`, `python` (in the sandbox), `search:FILE` (over
    a .txt file with passages separated by blank lines, or a .jsonl file with the keys `text` and
    `title`), or a function of your own with type hints and a docstring, `file.py:function`. The
    chat template receives their schemas."""

    max_turns: PositiveInt = 8
    """Maximum number of turns of the policy in an episode. sampling.max_tokens limits all tokens
    after the prompt, the environment's included."""

    timeout: Seconds = 60.0
    """Seconds that the environment may take to start and to answer a turn. An episode whose
    environment takes longer or fails is counted and excluded from training."""

    def _contradictions(self) -> Iterator[str]:
        if self.tools and self.name is None:
            yield (
                f"environment.tools = {list(self.tools)} without an environment that runs them; "
                "set environment.name = 'agent'"
            )
        if self.name is None:
            for key in self.parameters:
                yield f"environment.{key}: no environment takes it; set environment.name"
