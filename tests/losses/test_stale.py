"""Stale completions: the ratio over the sampler's own log-probs corrects them, whatever number of
policy versions lies between."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.batch import TokenBatch
from jaxrl.losses import (
    Scores,
    anchor_over_sampler,
    one_sequence,
    over_anchor,
    over_sampler,
    product,
)

WORDS, TOKENS, VERSIONS = 3, 3, 4


def policies() -> np.ndarray:
    """Log-probs of four versions, f64[version, previous word, word]; each moves from the last."""
    rng = np.random.default_rng(0)
    logits = np.cumsum(rng.normal(0, 0.4, (VERSIONS, WORDS + 1, WORDS)), axis=0)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def logprobs(policy: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Log-probs of the words of sequences, f64[N, TOKENS]; WORDS is the word before the first."""
    before = np.concatenate([np.full((len(sequences), 1), WORDS), sequences[:, :-1]], axis=1)
    return policy[before, sequences]


def test_versions_within_a_completion_leave_no_bias():
    """The expectation of any reward under the learner is that of weight x reward under the sampler,
    which changed its version at every token; summed over all 27 completions."""
    versions, sequences = policies(), np.array([*itertools.product(range(WORDS), repeat=TOKENS)])
    by_version = np.stack([logprobs(policy, sequences) for policy in versions])
    learner = by_version[-1]
    sampler = by_version[[0, 1, 2], :, range(TOKENS)].T
    ones = jnp.ones(sequences.shape)
    batch = TokenBatch(
        tokens=jnp.asarray(sequences),
        segments=ones.astype(int),
        positions=jnp.broadcast_to(jnp.arange(TOKENS), ones.shape),
        action_mask=ones.astype(bool),
        sampler_logprobs=jnp.asarray(sampler, jnp.float32),
        advantages=ones,
    )
    scores = Scores(logprobs=jnp.asarray(learner, jnp.float32))
    weights = np.asarray(product(over_sampler).value(scores, batch))[:, 0].astype(float)
    rewards = np.random.default_rng(1).normal(size=len(sequences))
    expected = np.sum(np.exp(learner.sum(1)) * rewards)
    behaviour = np.exp(sampler.sum(1))
    np.testing.assert_allclose(behaviour.sum(), 1)
    np.testing.assert_allclose(np.sum(behaviour * weights * rewards), expected, rtol=1e-5)
    # One version for all tokens is another policy: its ratio would be biased.
    wrong = np.exp((learner - by_version[0]).sum(1))
    assert abs(np.sum(behaviour * wrong * rewards) - expected) > 0.01


def test_ratios_of_successive_versions_telescope():
    """Their product is the plain ratio, with its gradient; so is an anchor's weight x ratio."""
    sequence = np.array([[2, 0, 1]])
    steps = [jnp.asarray(logprobs(policy, sequence)[0], jnp.float32) for policy in policies()]
    oldest, *between, newest = steps

    def chain(logits: jax.Array) -> jax.Array:
        """The product over versions, token by token."""
        found = jnp.ones(TOKENS)
        for old, new in itertools.pairwise([oldest, *between, logits]):
            scores, batch = one_sequence(advantages=[1] * TOKENS, logprobs=new, anchor=old)
            found = found * over_anchor.value(scores, batch)[0]
        return found

    def plain(logits: jax.Array) -> jax.Array:
        scores, batch = one_sequence(advantages=[1] * TOKENS, logprobs=logits, sampler=oldest)
        return over_sampler.value(scores, batch)[0]

    def anchored(logits: jax.Array) -> jax.Array:
        scores, batch = one_sequence(
            advantages=[1] * TOKENS, logprobs=logits, sampler=oldest, anchor=between[-1]
        )
        return (anchor_over_sampler.value(scores, batch) * over_anchor.value(scores, batch))[0]

    wanted = np.exp(np.asarray(newest) - np.asarray(oldest))
    for way in (chain, plain, anchored):
        np.testing.assert_allclose(way(newest), wanted, rtol=1e-5)
        np.testing.assert_allclose(jax.jacobian(way)(newest), np.diag(wanted), atol=1e-5)
