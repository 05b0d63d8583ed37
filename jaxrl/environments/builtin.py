"""Environments that a config names; each function creates the environment of one episode.

A user's own environment is a class or function with the same signature: it takes an
`EnvironmentContext`, and the other keys of the config table `environment` as keyword arguments.
"""

import functools
import shlex
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from jaxrl.core import plugins
from jaxrl.environments.connectors.agents import run_command, run_function
from jaxrl.environments.connectors.openenv import Server, Session
from jaxrl.environments.connectors.verifiers import Host
from jaxrl.environments.episodes import text_game as text_games
from jaxrl.environments.episodes.agent import Agent
from jaxrl.environments.episodes.base import Environment
from jaxrl.environments.episodes.context import EnvironmentContext
from jaxrl.environments.episodes.conversations import Templates
from jaxrl.environments.episodes.gateway import GatewayEpisode, Start

if TYPE_CHECKING:
    from jaxrl.environments.gateway.server import Gateway

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
    make = plugins.load_function(game, builtin=None, key="environment.game")
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
    """Plays tasks of an environment of `verifiers`, whose programs request turns at the gateway.

    `python` is the interpreter of an environment that has verifiers. `config` is a TOML file with
    the contents of verifiers' `env` table: the taskset and its agents. Raises ValueError if the
    environment cannot be loaded, or as `gateway`.
    """
    return _agent_episode(context, _host(python, config).begin)


def gateway(
    context: EnvironmentContext,
    *,
    agent: str | None = None,
    command: str | Sequence[str] = (),
    models: Sequence[str] = ("policy",),
    host: str = "127.0.0.1",
    port: int = 0,
) -> Environment:
    """Runs an agent that takes the policy for a model of OpenAI or Anthropic; see
    `connectors.agents`.

    Args:
      context: the policy's side.
      agent: a function, as `file.py:function` or `package.module:function`; it gets the address of
        its episode (`Endpoint`) and the row, and may return a reward.
      command: a command line instead, or its words; `{name}` stands for a column of the row.
      models: names by which agents may call the policy.
      host: the address at which agents reach it.
      port: the port; 0 takes a free one.

    Raises:
      ValueError: for both or neither of `agent` and `command`, a function that cannot be loaded, an
        address that is taken, with environment.tools, or without a chat template.
      RuntimeError: without the packages of `jaxrl[gateway]`.
    """
    if bool(agent) == bool(command):
        raise ValueError(
            "environment.agent and environment.command: set one of them, the agent's function or "
            "its command"
        )
    if context.tools:
        raise ValueError("environment.tools: the agent of a gateway sends its own; leave it out")
    words = shlex.split(command) if isinstance(command, str) else list(command)
    start = functools.partial(run_command, words)
    if agent is not None:
        function = plugins.load_function(agent, builtin=None, key="environment.agent")
        start = functools.partial(run_function, function)
    return _agent_episode(context, start, host=host, port=port, models=tuple(models))


def _agent_episode(
    context: EnvironmentContext,
    start: Start,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    models: tuple[str, ...] = ("policy",),
) -> Environment:
    if context.limits is None:
        raise ValueError("the context of a gateway needs the limits of its episodes; set limits")
    try:
        served = _gateway(host, port, models)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"the gateway needs {error.name}: pip install 'jaxrl[gateway]'"
        ) from error
    except OSError as error:
        raise ValueError(
            f"environment.host = {host!r}, environment.port = {port}: {error}; choose a free port, "
            "or 0"
        ) from error
    return GatewayEpisode(_templates(context.chat), served, start, limits=context.limits)


def _once(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """Caches a function; episodes that begin together, in their threads, wait for the first."""
    lock, made = threading.Lock(), functools.cache(make)

    @functools.wraps(make)
    def get(*args: _P.args, **options: _P.kwargs) -> _R:
        with lock:
            return made(*args, **options)

    return get


@_once  # one server for all episodes of a run
def _gateway(host: str, port: int, models: tuple[str, ...]) -> "Gateway":
    from jaxrl.environments.gateway.server import Gateway

    return Gateway(host, port, models)


_templates = functools.lru_cache(4)(Templates)  # which the episodes of a run share
_host = _once(Host)  # one process for all episodes of a run
_server = _once(Server.at)  # reads the server's schema once per run
