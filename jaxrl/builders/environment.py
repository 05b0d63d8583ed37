"""Builds the environment of a run from its config."""

import functools
import inspect
from collections.abc import Mapping

from jaxrl.config.training import Config
from jaxrl.core import plugins
from jaxrl.data.prompts import Tokenizer
from jaxrl.environments.episodes import builtin
from jaxrl.environments.episodes.base import Limits
from jaxrl.environments.episodes.play import Arena, RequestsDesk, RoundsDesk
from jaxrl.environments.tools.schema import Tool


def make_arena(
    config: Config, tokenizer: Tokenizer, tools: Mapping[str, Tool], *, vocab_size: int
) -> Arena | None:
    """Builds what plays the episodes of a run; None if rollouts have a single turn.

    One environment is made at once, so that a wrong parameter ends the run at its start.

    Args:
      config: of the run.
      tokenizer: the policy's.
      tools: by name.
      vocab_size: of the policy.

    Raises:
      ValueError: for an environment that cannot be loaded or made, or a parameter that it does not
        accept.
    """
    c = config.environment
    if c.name is None:
        return None
    function = plugins.load_function(c.name, builtin=builtin, key="environment.name")
    kit = builtin.Kit(tokenizer, tools)
    first = next(iter(inspect.signature(function).parameters), None)
    if first is None:
        raise ValueError(
            f"environment.name = {c.name!r} takes no argument; its first one must be a Kit"
        )
    plugins.check_parameters(function, {first: kit, **c.parameters}, key="environment")
    make = functools.partial(function, kit, **c.parameters)
    make()
    limits = Limits(
        turns=c.max_turns,
        tokens=config.sampling.max_tokens,
        prompt_tokens=config.data.max_prompt_tokens,
        seconds=c.timeout,
        vocab_size=vocab_size,
    )
    return Arena(make, limits, RequestsDesk if config.sampler.name == "vllm" else RoundsDesk)
