"""The server of reward.model: a teacher, or a reward model."""

import contextlib
import functools
import time
from collections.abc import Sequence

import numpy as np

from jaxrl.bridge import ControlError, VllmServer, known_key
from jaxrl.builders.reward_model import RewardModel
from jaxrl.config.training import Config
from jaxrl.core import Rollout
from jaxrl.huggingface import Checkpoint

_COMPARED = 32  # token ids that the policy's and the server's tokenizer must decode alike
_WAITS = (1.0, 10.0)  # seconds before a failed request is sent again
_START = (
    "start a teacher with `jaxrl serve` or a reward model with `vllm serve --runner pooling`, and "
    "give its address"
)


def open_server(config: Config, *, timeout: float) -> VllmServer:
    """Returns a client of the server, without connecting; `timeout` is in seconds per request."""
    assert config.reward.model is not None
    return VllmServer(config.reward.model, timeout=timeout, api_key=known_key())


def serves_scores(config: Config) -> bool:
    """Tells if the server's model is a reward model; raises ValueError if it does not answer."""
    try:
        return open_server(config, timeout=config.reward.timeout).classifies()
    except ControlError as error:
        raise _silent(config, error) from None


def check_server(server: VllmServer, config: Config, policy: Checkpoint, *, needed: int) -> int:
    """Returns the longest sequence that the server takes, in tokens.

    Raises:
      ValueError: if it takes fewer than `needed` tokens, decodes token ids other than the policy's
        tokenizer does, or does not answer.
    """
    url, tokenizer = config.reward.model, policy.tokenizer
    ids = sorted(tokenizer.get_vocab().values())
    ids = ids[:: -(-len(ids) // _COMPARED)]
    try:
        longest, texts = server.max_model_len(), server.decode(ids)
    except ControlError as error:
        raise _silent(config, error) from None
    if longest < needed:
        spare = " + 1" if needed > config.longest_sequence else ""
        raise ValueError(
            f"reward.model = {url!r} accepts {longest} tokens, but scoring a prompt and a "
            f"completion needs {needed} (data.max_prompt_tokens + sampling.max_tokens{spare}); "
            "start it with a larger --max_model_len, or lower one of these"
        )
    if texts != (own := tokenizer.decode(ids, skip_special_tokens=False)):
        raise ValueError(
            f"reward.model = {url!r} reads the policy's token ids, but its tokenizer is not the "
            f"policy's: it decodes {ids} as {texts!r}, the policy as {own!r}; serve a model with "
            "the policy's tokenizer"
        )
    return longest


def connect_reward_model(config: Config, policy: Checkpoint) -> RewardModel:
    """Returns a function that asks the server for the score of each rollout, f64[N], and raises
    ControlError if it fails three times. Raises as `check_server`."""
    server = open_server(config, timeout=config.reward.timeout)
    check_server(server, config, policy, needed=config.longest_sequence)
    return functools.partial(_ask, server)


def _ask(server: VllmServer, rollouts: Sequence[Rollout]) -> np.ndarray:
    sequences = [[*r.prompt.tolist(), *r.completion.tolist()] for r in rollouts]
    for wait in _WAITS:
        with contextlib.suppress(ControlError):
            return np.array(server.scores(sequences))
        time.sleep(wait)
    return np.array(server.scores(sequences))


def _silent(config: Config, error: ControlError) -> ValueError:
    return ValueError(f"reward.model = {config.reward.model!r}: {error}; {_START}")
