"""The argument of every function that creates an environment."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.environments.episodes.base import EpisodeLimits
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.episodes.tool_chat import ToolChat
from jaxrl.environments.tools.schema import Tool


@dataclasses.dataclass(frozen=True)
class EnvironmentContext:
    """The policy's side of an environment."""

    tokenizer: Tokenizer
    tools: Mapping[str, Tool]  # of the config, by name
    # Variables of the chat template.
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limits: EpisodeLimits | None = None  # of the episodes; None outside of a run

    @functools.cached_property
    def chat(self) -> Chat:
        """The renderer of chat messages; raises ValueError if the chat template is missing or drops
        messages."""
        return Chat(self.tokenizer, self.template_kwargs)

    @functools.cached_property
    def tool_chat(self) -> ToolChat:
        """The reader of tool calls; raises ValueError if the chat template does not show the tools
        or writes calls in no format that is read."""
        return ToolChat(self.chat, [tool.schema for tool in self.tools.values()])
