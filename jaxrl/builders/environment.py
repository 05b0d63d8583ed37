"""Builds the environment of a run from its config."""

import functools
from collections.abc import Callable, Mapping

from jaxrl.config.environment import EnvironmentConfig
from jaxrl.config.training import Config
from jaxrl.core import check_parameters, declared_parameters, load_function, naming_keys
from jaxrl.data import Tokenizer
from jaxrl.environments import (
    ContinuousScheduler,
    Environment,
    EnvironmentContext,
    EpisodeLimits,
    EpisodeRunner,
    LockstepScheduler,
    Tool,
    builtin,
)


def make_episode_runner(
    config: Config, tokenizer: Tokenizer, tools: Mapping[str, Tool], *, vocab_size: int
) -> EpisodeRunner | None:
    """Builds the episode runner of a run; None if rollouts have a single turn.

    Makes one environment first, so that a wrong parameter ends the run at its start. `tokenizer`
    and `vocab_size` are the policy's. Raises as `load_environment`.
    """
    c = config.environment
    function = load_environment(c)
    if function is None or c.name is None:
        return None
    limits = EpisodeLimits(
        max_turns=c.max_turns,
        max_tokens=config.sampling.max_tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        timeout=c.timeout,
        vocab_size=vocab_size,
    )
    context = EnvironmentContext(tokenizer, tools, config.data.template_kwargs, limits)
    made = naming_keys(
        lambda given: function(context, **given), c.parameters, key="environment", name=c.name
    )
    if (close := getattr(made, "close", None)) is not None:
        close()
    return EpisodeRunner(
        functools.partial(function, context, **c.parameters),
        limits,
        ContinuousScheduler if config.sampler.name == "vllm" else LockstepScheduler,
    )


def load_environment(c: EnvironmentConfig) -> Callable[..., Environment] | None:
    """Loads the function that makes the environment of an episode; None for single turns.

    Raises:
      ValueError: for an environment that cannot be loaded, or a parameter that it does not accept.
    """
    if c.name is None:
        return None
    function = load_function(c.name, builtin=builtin, key="environment.name")
    first = next(iter(declared_parameters(function, key="environment")), None)
    if first is None:
        raise ValueError(
            f"environment.name = {c.name!r} takes no argument; its first one must be an "
            "EnvironmentContext"
        )
    own = tuple(type(c).model_fields)
    check_parameters(function, {first: None, **c.parameters}, key="environment", also=own)
    return function
