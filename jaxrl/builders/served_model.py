"""Servers of reward.model, a teacher or a reward model, and of the reference."""

import contextlib
import functools
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.bridge import ControlError, VllmServer, headers, known_key
from jaxrl.builders.reward_model import RewardModel
from jaxrl.builders.served_head import rounds_logits, sampled_gaps
from jaxrl.config.training import Config
from jaxrl.core import Rollout
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import VllmScorer

_COMPARED = 32  # token ids that the policy's and the server's tokenizer must decode alike
_WAITS = (1.0, 10.0)  # seconds before a failed request is sent again
_START = {
    "reward.model": (
        "start a teacher with `jaxrl serve` or a reward model with `python -m "
        "vllm.entrypoints.openai.api_server --model MODEL --runner pooling`, and give its address"
    ),
    "reference.server": "start it with `jaxrl serve MODEL`, and give its address",
}


def serves_scores(config: Config) -> bool:
    """Tells if the server of reward.model has a reward model; raises ValueError if it does not
    answer."""
    try:
        return _reward_server(config).classifies()
    except ControlError as error:
        raise _silent("reward.model", config.reward.model, error) from None


def _reward_server(config: Config) -> VllmServer:
    assert config.reward.model is not None
    return VllmServer(config.reward.model, timeout=config.reward.timeout, api_key=known_key())


def _check_server(
    server: VllmServer, config: Config, policy: Checkpoint, *, key: str, needed: int
) -> int:
    """Returns the longest sequence that the server of a key takes, in tokens.

    Raises:
      ValueError: if it takes fewer than `needed` tokens, decodes token ids other than the policy's
        tokenizer does, or does not answer.
    """
    url, tokenizer = server.url, policy.tokenizer
    ids = sorted(tokenizer.get_vocab().values())
    ids = ids[:: -(-len(ids) // _COMPARED)]
    try:
        longest, texts = server.max_model_len(), server.decode(ids)
    except ControlError as error:
        raise _silent(key, url, error) from None
    if longest < needed:
        spare = " + 1" if needed > config.longest_sequence else ""
        raise ValueError(
            f"{key} = {url!r} accepts {longest} tokens, but scoring a prompt and a "
            f"completion needs {needed} (data.max_prompt_tokens + sampling.max_tokens{spare}); "
            "start it with a larger --max_model_len, or lower one of these"
        )
    if texts != (own := tokenizer.decode(ids, skip_special_tokens=False)):
        raise ValueError(
            f"{key} = {url!r} reads the policy's token ids, but its tokenizer is not the "
            f"policy's: it decodes {ids} as {texts!r}, the policy as {own!r}; serve a model with "
            "the policy's tokenizer"
        )
    return longest


def connect_reward_model(config: Config, policy: Checkpoint) -> RewardModel:
    """Returns a function that asks the server for the score of each rollout, f64[N], and raises
    ControlError if it fails three times. Raises as `connect_scorer`."""
    server = _reward_server(config)
    _check_server(server, config, policy, key="reward.model", needed=config.longest_sequence)
    return functools.partial(_ask, server)


def _ask(server: VllmServer, rollouts: Sequence[Rollout]) -> np.ndarray:
    sequences = [[*r.prompt.tolist(), *r.completion.tolist()] for r in rollouts]
    for wait in _WAITS:
        with contextlib.suppress(ControlError):
            return np.array(server.scores(sequences))
        time.sleep(wait)
    return np.array(server.scores(sequences))


def connect_scorer(config: Config, policy: Checkpoint, *, key: str, url: str) -> VllmScorer:
    """Returns a client of the language model on the server of a key.

    Raises:
      ValueError: if the server takes too few tokens, decodes token ids other than the policy's
        tokenizer does, rounds its logits to 16 bits where `logits` is f32, or does not answer.
    """
    c = config.sampler
    server = VllmServer(url, timeout=c.timeout, api_key=known_key())
    # vLLM draws a token after those that it scores.
    longest = _check_server(server, config, policy, key=key, needed=config.longest_sequence + 1)
    _check_head(server, config, policy, key=key, longest=longest)
    return VllmScorer(
        [server.url],
        max_positions=longest,
        vocab_size=policy.config.vocab_size,
        max_requests=c.max_requests,
        timeout=c.timeout,
        headers=headers(known_key()),
    )


def _check_head(
    server: VllmServer, config: Config, policy: Checkpoint, *, key: str, longest: int
) -> None:
    if config.precision.logits.itemsize == 2:
        return
    try:
        name = server.models()[0]["id"]
        gaps = sampled_gaps(server, policy.config, model=name, longest=longest)
    except ControlError as error:
        raise _silent(key, server.url, error) from None
    if rounds_logits(gaps, dtype=jnp.float16):  # also true of bf16, which is coarser
        raise ValueError(
            f"{key} = {server.url!r} rounds its logits to 16 bits, and logits of precision are "
            "f32; start it with `jaxrl serve MODEL`, or with --hf-overrides "
            '\'{"head_dtype": "float32"}\', or give logits 16 bits in precision'
        )


def ask_scorer(client: VllmScorer, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Returns the log-probs of each completion, f32[C]."""
    scores = client.score([np.concatenate([r.prompt, r.completion]) for r in rollouts])
    return [one[len(r.prompt) :] for one, r in zip(scores, rollouts, strict=True)]


def _silent(key: str, url: str | None, error: ControlError) -> ValueError:
    return ValueError(f"{key} = {url!r}: {error}; {_START[key]}")
