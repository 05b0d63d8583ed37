"""Opens the teacher that a config names: a language model that judges each token of a completion.

On-policy distillation: the policy samples, and the advantage of each of its tokens gains
log teacher - log sampler, minus an estimate of the reverse KL (Thinking Machines, "On-Policy
Distillation", 2025; GKD, arXiv:2306.13649).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import jax
import numpy as np

from jaxrl.bridge import ControlError, VllmServer, headers, known_key
from jaxrl.builders.model import ModelFiles
from jaxrl.builders.reward_model import load_judge
from jaxrl.builders.rows import minibatch_shape
from jaxrl.config.training import Config
from jaxrl.core import Hosts, Minibatch, MinibatchShape, Rollout, jit, pack_minibatch, unpack
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import make_score
from jaxrl.sampling import VllmScorer
from jaxrl.sharding import Layout, fetch

Teacher = Callable[[Sequence[Rollout]], Sequence[np.ndarray]]
"""Rollouts -> f32[C] for each, log-probs of its completion; NaN where there is none."""

_COMPARED = 32  # token ids that the policy's and the server's tokenizer must decode alike


def names_teacher(config: Config, models: ModelFiles) -> bool:
    """Tells if reward.model is a language model, not a reward model."""
    judge = models.judge
    return config.reward.teacher_url or (judge is not None and not judge.config.scored)


@contextmanager
def open_teacher(
    config: Config, models: ModelFiles, *, layout: Layout, hosts: Hosts
) -> Iterator[Teacher | None]:
    """Opens the teacher of a run; None if the config names none. Process 0 asks a server; a model
    in a directory runs on the learner's devices.

    Raises:
      ValueError: for a model or a server that cannot be used; the message names the key.
    """
    if not names_teacher(config, models):
        yield None
    elif not config.reward.teacher_url:
        yield hosts.on_all(_load_teacher(config, models, layout=layout))
    elif hosts.leads:
        with closing(_connect(config, models.policy)) as client:
            yield functools.partial(_ask, client)
    else:
        yield None


def _load_teacher(config: Config, models: ModelFiles, *, layout: Layout) -> Teacher:
    """Loads a teacher in `precision.compute`; rows and microbatches are the learner's."""
    model, params = load_judge(config, models, layout=layout, output="tokens")
    model = model._replace(temperature=config.sampling.temperature)
    shardings = layout.constraints(model.specs)
    score = make_score(model, precision=config.precision, param_shardings=shardings)
    # Sized for the worst case, one sequence per row, so that it compiles once.
    shape = minibatch_shape(config, layout, max_rows=config.minibatch_completions)
    compiled = functools.partial(jit(score, sums=config.precision.sums), params)
    return functools.partial(score_completions, score=compiled, shape=shape)


def score_completions(
    rollouts: Sequence[Rollout], *, score: Callable[[Minibatch], jax.Array], shape: MinibatchShape
) -> list[np.ndarray]:
    """Scores completions with a compiled model: f32[C] for each, 0 where the policy did not choose
    the token."""
    # A teacher does not have the policy's experts.
    rollouts = [r._replace(experts=None) for r in rollouts]
    most, found = shape.max_rows or len(rollouts), list[np.ndarray]()
    for first in range(0, len(rollouts), most):
        some = rollouts[first : first + most]
        minibatch = pack_minibatch(some, [0.0] * len(some), shape=shape)
        found += unpack(fetch(score(minibatch)), some, shape=shape)
    return found


def _connect(config: Config, policy: Checkpoint) -> VllmScorer:
    url, tokenizer = config.reward.model, policy.tokenizer
    assert url is not None
    key, c = known_key(), config.sampler
    server = VllmServer(url, timeout=c.timeout, api_key=key)
    ids = sorted(tokenizer.get_vocab().values())
    ids = ids[:: -(-len(ids) // _COMPARED)]
    try:
        longest, texts = server.max_model_len(), server.decode(ids)
    except ControlError as error:
        raise ValueError(
            f"reward.model = {url!r}: {error}; start the teacher with `jaxrl serve` and give its "
            "address"
        ) from None
    # vLLM draws a token after those that it scores.
    if longest <= config.longest_sequence:
        raise ValueError(
            f"reward.model = {url!r} accepts {longest} tokens, but scoring a prompt and a "
            f"completion needs {config.longest_sequence + 1} (data.max_prompt_tokens + "
            "sampling.max_tokens + 1); start it with a larger --max_model_len, or lower one of "
            "these"
        )
    if texts != (own := tokenizer.decode(ids, skip_special_tokens=False)):
        raise ValueError(
            f"reward.model = {url!r} reads the policy's token ids, but its tokenizer is not the "
            f"policy's: it decodes {ids} as {texts!r}, the policy as {own!r}; serve a model with "
            "the policy's tokenizer"
        )
    return VllmScorer(
        [url],
        max_positions=longest,
        vocab_size=policy.config.vocab_size,
        max_requests=c.max_requests,
        timeout=c.timeout,
        headers=headers(key),
    )


def _ask(client: VllmScorer, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    scores = client.score([np.concatenate([r.prompt, r.completion]) for r in rollouts])
    return [one[len(r.prompt) :] for one, r in zip(scores, rollouts, strict=True)]
