"""The environments that a config can name: each function makes that of one episode.

One of the user's own is a class, or a function, that is called in the same way: with a `Kit`, and
the further keys of the config's table `environment` as keyword arguments.
"""

import functools
from collections.abc import Mapping

from jaxrl.core import plugins
from jaxrl.data.prompts import Tokenizer
from jaxrl.environments.episodes import text_game as text_games
from jaxrl.environments.episodes.agent import Agent
from jaxrl.environments.episodes.base import Environment
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.tools.schema import Tool


class Kit:
    """What an environment is given.

    Attributes:
      tokenizer: the policy's.
      tools: those of the config, by name.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Mapping[str, Tool]) -> None:
        self.tokenizer, self.tools = tokenizer, tools

    @functools.cached_property
    def chat(self) -> Chat:
        """Turns text into messages of token ids; raises ValueError as `Chat`."""
        return Chat(self.tokenizer)


def agent(kit: Kit, *, call_cost: float = 0.0, max_characters: int = 2000) -> Environment:
    """Lets the policy call tools until it answers without a call; see `Agent`.

    Args:
      kit: with at least one tool.
      call_cost: what a call takes from the reward.
      max_characters: of what a tool answers; the rest is left out.

    Raises:
      ValueError: without a tool, or without a chat template.
    """
    if not kit.tools:
        raise ValueError("environment.tools is empty: an agent needs something to call")
    return Agent(kit.chat, kit.tools, call_cost=call_cost, max_characters=max_characters)


def text_game(kit: Kit, *, game: str) -> Environment:
    """Lets the policy play a game that is told in words; see `TextGame`.

    Args:
      kit: for its chat.
      game: `file.py:function` or `package.module:Class`, called without arguments for each episode:
        it returns an object with Gymnasium's `reset` and `step`.

    Raises:
      ValueError: for a game that cannot be loaded, or without a chat template.
    """
    make = plugins.load_function(game, builtin=text_games, key="environment.game")
    return text_games.TextGame(make, chat=kit.chat, tokenizer=kit.tokenizer)
