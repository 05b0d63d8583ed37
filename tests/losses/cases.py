"""Random sequences with all their scores, laid out in rows in any way a test asks for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.batch import Rollout, TokenBatch
from jaxrl.core.packing import pack
from jaxrl.losses import (
    Objective,
    Recipe,
    Scores,
    TokenLoss,
    absolute,
    anchor_over_sampler,
    binary_kl,
    both,
    build,
    clipped,
    completion_likelihood,
    drift_penalty,
    entropy_bonus,
    error_within,
    gamma_shaped,
    geometric,
    geometric_clipped,
    k1,
    k1_plus,
    k2,
    k2_sum_within,
    k2_within,
    k3,
    k3_plus,
    k3_sum_within,
    k3_within,
    kl_penalty,
    likelihood,
    load_balance,
    masked,
    near,
    normalized,
    objective,
    observation_likelihood,
    off_policy_negatives,
    over_anchor,
    over_sampler,
    positive_likelihood,
    product,
    recipes,
    reinforce,
    reweight,
    sequence,
    sequence_mean_token_mean,
    shadowed,
    soft_gated,
    token_mean,
    top_covariance,
    top_entropy,
    total_variation,
    truncated,
    trust_region,
    unclipped,
    vetoed,
    within,
    without_covariance,
)

RECIPES: dict[str, Recipe] = {
    name: build(name, {"max_length": 8} if name == "dr_grpo" else {}) for name in recipes.__all__
}

ROWS, ROW_LENGTH = 6, 24  # one shape for all layouts, so that each loss compiles once

SCORES = ("logprobs", "entropy", "anchor", "shadow", "reference", "imbalance", "observed")

TERMS: dict[str, TokenLoss] = {
    "reinforce": reinforce(),
    "unclipped": unclipped(over_sampler),
    "clipped over sampler": clipped(over_sampler),
    "clipped over anchor": clipped(over_anchor, high=0.28),
    "clipped shadowed": clipped(shadowed),
    "dual": clipped(over_sampler, dual=1.5),
    "cap": clipped(over_sampler, cap=1.4),
    "sequence": clipped(sequence(over_sampler)),
    "product": clipped(product(over_anchor)),
    "geometric": clipped(geometric(over_sampler)),
    "token tis": reweight(clipped(over_anchor), truncated(anchor_over_sampler, high=1.1)),
    "token mis": reweight(clipped(over_anchor), masked(anchor_over_sampler, low=0.8, high=1.2)),
    "sequence tis": reweight(
        clipped(over_anchor), truncated(product(anchor_over_sampler), high=1.1)
    ),
    "sequence mis": reweight(reinforce(), masked(product(over_sampler), low=0.7, high=1.5)),
    "likelihood": likelihood(),
    "soft gate": soft_gated(over_sampler),
    "geometric clip": geometric_clipped(over_sampler, low=0.1, high=0.1),
    "gamma weights": reweight(likelihood(), gamma_shaped(product(over_sampler))),
    "within": reweight(clipped(over_anchor), within(anchor_over_sampler, low=0.8, high=1.2)),
    "both": reweight(
        clipped(over_anchor),
        both(
            truncated(anchor_over_sampler, high=1.1),
            within(geometric(anchor_over_sampler), low=0.9, high=1.1),
        ),
    ),
    "k2 within": reweight(reinforce(), k2_within(over_sampler, high=0.05)),
    "k3 sum within": reweight(reinforce(), k3_sum_within(over_sampler, high=0.2)),
    "k2 sum within": reweight(reinforce(), k2_sum_within(over_sampler, high=0.2)),
    "k3 within": reweight(reinforce(), k3_within(over_sampler, high=0.05)),
    "veto": reweight(reinforce(), vetoed(over_sampler, low=0.7, high=1.6)),
    "opsm": reweight(reinforce(), off_policy_negatives(over_sampler, delta=0.05)),
    "error within": reweight(reinforce(), error_within(over_sampler, high=1.3)),
    "variation": reweight(
        reinforce(), trust_region(over_sampler, total_variation, low=0.03, high=0.03)
    ),
    "binary kl": reweight(reinforce(), trust_region(over_sampler, binary_kl, low=0.01, high=0.01)),
    "near": reweight(reinforce(), near(over_sampler, total_variation, high=0.03)),
    "drift": drift_penalty(over_sampler),
    "absolute drift": drift_penalty(over_anchor, absolute),
    "weighted k3": kl_penalty(k3, ratio=over_sampler),
    "k1": kl_penalty(k1),
    "k2": kl_penalty(k2),
    "k3": kl_penalty(k3),
    "k1+": kl_penalty(k1_plus),
    "k3+": kl_penalty(k3_plus),
    "entropy": entropy_bonus(),
    "balance": load_balance(),
}


# Those that depend on the whole batch, beyond one denominator.
OBJECTIVES: dict[str, Objective] = {
    "positive nll": objective(reinforce(), token_mean) + 0.5 * positive_likelihood(),
    "observation nll": objective(clipped(over_anchor), sequence_mean_token_mean)
    + 0.5 * observation_likelihood(),
    "completion nll": objective(clipped(over_anchor), sequence_mean_token_mean)
    + 0.5 * completion_likelihood(),
    "normalized": objective(
        normalized(truncated(over_sampler, high=1.1), token_mean) * reinforce(), token_mean
    ),
    "normalized sequences": objective(
        normalized(truncated(product(over_sampler), high=1.1), sequence_mean_token_mean)
        * reinforce(),
        sequence_mean_token_mean,
    ),
    "top entropy": objective(top_entropy(0.5) * reinforce(), token_mean),
    "top covariance": objective(top_covariance(0.5) * drift_penalty(over_sampler), token_mean),
    "without covariance": objective(
        without_covariance(0.2, low=0.05, high=2.0) * reinforce(), sequence_mean_token_mean
    ),
    "among": objective(
        clipped(geometric(over_anchor)) + entropy_bonus(),
        sequence_mean_token_mean,
        among=both(within(over_sampler, low=0.7, high=1.6), vetoed(anchor_over_sampler, low=0.5)),
    )
    + 0.5 * positive_likelihood(),
}


class Answer(NamedTuple):
    rollout: Rollout
    scores: dict[str, np.ndarray]  # of the completion, f32[C]
    advantages: np.ndarray  # f32[C]


def random_sequences(seed: int, *, number: int = ROWS, spread: float = 0.3) -> list[Answer]:
    """Answers of 0 to 8 tokens, some of them tool output, some without a sampler log-prob."""
    rng = np.random.default_rng(seed)
    return [_random_answer(rng, spread) for _ in range(number)]


def _random_answer(rng: np.random.Generator, spread: float) -> Answer:
    prompt, length = int(rng.integers(1, 5)), int(rng.integers(0, 9))
    logprobs = -rng.uniform(0.1, 3.0, length)

    def near() -> np.ndarray:
        return (logprobs + spread * rng.normal(size=length)).astype(np.float32)

    sampler = near()
    sampler[rng.random(length) < 0.15] = np.nan
    rollout = Rollout(
        prompt=rng.integers(1, 50, prompt),
        completion=rng.integers(1, 50, length),
        logprobs=sampler,
        action_mask=rng.random(length) < 0.8,
        version=np.zeros(length, np.int32),
        group=0,
        reward=float(rng.integers(-1, 2)),
    )
    scores = {name: near() for name in SCORES} | {"logprobs": logprobs.astype(np.float32)}
    return Answer(rollout, scores, rng.normal(size=length).astype(np.float32))


def lay_out(
    sequences: Sequence[Answer],
    rows: Sequence[Sequence[int]],
    *,
    shape: tuple[int, int] = (ROWS, ROW_LENGTH),
    padding: float = 0.0,
) -> tuple[Scores, TokenBatch]:
    """Packs sequences; score entries that belong to no completion token hold `padding`."""
    rows = [*rows, *[()] * (shape[0] - len(rows))]
    batch = pack(
        [s.rollout for s in sequences],
        [s.advantages for s in sequences],
        rows=rows,
        row_length=shape[1],
    )
    arrays = {name: np.full(shape, padding, np.float32) for name in SCORES}
    for i, index in places(sequences, rows):
        for name in SCORES:
            arrays[name][index] = sequences[i].scores[name]
    return Scores(**jax.tree.map(jnp.asarray, arrays)), jax.tree.map(jnp.asarray, batch)


def places(sequences: Sequence[Answer], rows: Sequence[Sequence[int]]) -> list[tuple[int, Any]]:
    """(sequence, index of its completion tokens in the layout) for all that are laid out."""
    found = []
    for r, members in enumerate(rows):
        start = 0
        for i in members:
            rollout = sequences[i].rollout
            end = start + rollout.length
            found.append((i, (r, slice(start + len(rollout.prompt), end))))
            start = end
    return found
