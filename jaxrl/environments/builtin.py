"""Environments that a config names; each function creates the environment of one episode.

A user's own environment is a class or function with the same signature: it takes an
`EnvironmentContext`, and the other keys of the config table `environment` as keyword arguments.
"""

import functools

from jaxrl.core import plugins
from jaxrl.environments.connectors.openenv import Server, Session
from jaxrl.environments.connectors.verifiers import Host
from jaxrl.environments.episodes import text_game as text_games
from jaxrl.environments.episodes.agent import Agent
from jaxrl.environments.episodes.base import Environment
from jaxrl.environments.episodes.context import EnvironmentContext
from jaxrl.environments.episodes.verifiers import VerifiersEpisode


def agent(
    context: EnvironmentContext, *, call_cost: float = 0.0, max_characters: int = 2000
) -> Environment:
    """Lets the policy call tools until a turn contains no call; see `Agent`.

    Each call costs `call_cost` of the reward. Tool results are cut to `max_characters`. Raises
    ValueError without tools, or as `ToolChat`.
    """
    if not context.tools:
        raise ValueError("environment.tools is empty: an agent needs at least one tool")
    chat, tools = context.tool_chat, context.tools
    return Agent(chat, tools, call_cost=call_cost, max_characters=max_characters)


def text_game(context: EnvironmentContext, *, game: str) -> Environment:
    """Lets the policy play a text game; see `TextGame`.

    The game is `file.py:function` or `package.module:Class`, called without arguments for each
    episode; it returns an object with Gymnasium's `reset` and `step`. Raises ValueError if the game
    cannot be loaded, or without a chat template.
    """
    make = plugins.load_function(game, builtin=text_games, key="environment.game")
    return text_games.TextGame(context.chat, make())


def openenv(
    context: EnvironmentContext,
    *,
    url: str,
    action: str | None = None,
    observation: str | None = None,
) -> Environment:
    """Plays the environment of an OpenEnv server; see `connectors.openenv`.

    The policy's text becomes the field `action`, by default the only one that the server's actions
    require. `observation` is a format string over the fields of an observation, such as
    "{question}"; without it the policy reads them as JSON. Raises ValueError if there is no server
    at `url`, or without a chat template.
    """
    chat, server = context.chat, _server(url, action=action, observation=observation)
    return text_games.TextGame(chat, Session(server))


def verifiers(context: EnvironmentContext, *, python: str, config: str) -> Environment:
    """Plays tasks of an environment of `verifiers`; see `episodes.verifiers`.

    `python` is the interpreter of an environment that has verifiers. `config` is a TOML file with
    the contents of verifiers' `env` table: the taskset and its agents. Raises ValueError if the
    environment cannot be loaded, or without a chat template.
    """
    host = _host(python, config)
    return VerifiersEpisode(context.chat, host)


_host = functools.cache(Host)  # one process for all episodes of a run
_server = functools.cache(Server.at)  # reads the server's schema once per run
