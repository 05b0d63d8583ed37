"""The table of a config that says who answers the policy."""

from typing import Any

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from jaxrl.config.tables import Plain, Section, Texts


class EnvironmentConfig(Section):
    """What answers the policy's turns; further keys of this table are keyword arguments of the
    environment."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Plain] = Field(init=False)

    name: str | None = None
    """An environment in jaxrl.environments.episodes.builtin (`agent` lets the policy call tools,
    `text_game` plays a game told in words), `file.py:Class` or `package.module:Class`. Without one
    a completion is a single turn."""

    tools: Texts = ()
    """What the policy can call: `calculator`, `python` (in the sandbox), `search` (in
    environment.corpus), or a function of your own with type hints and a docstring,
    `file.py:function`. The chat template is given their schemas."""

    corpus: str | None = None
    """What `search` searches: a .txt file with passages divided by blank lines, or a .jsonl file
    with the keys `text` and `title`."""

    max_turns: PositiveInt = 8
    """Turns of the policy in an episode. sampling.max_tokens bounds the tokens of the episode
    behind its prompt, those of the environment included."""

    timeout: PositiveFloat = 60.0
    """Seconds that the environment may take to begin, and to answer a turn. An episode whose
    environment takes longer, or fails, is not learnt from, and is counted."""

    weight: float = 1.0
    """Factor of what the environment itself gives, which is added to the reward."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments for the environment, to be checked against its signature."""
        return dict(self.__pydantic_extra__)
