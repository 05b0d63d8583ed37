"""Laws 1 to 3 of the design, for every term and every aggregation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import assign_rows
from jaxrl.losses import (
    Weights,
    add,
    clipped,
    fixed_length,
    geometric,
    objective,
    one_sequence,
    over_anchor,
    over_sampler,
    prefix,
    reinforce,
    reweight,
    scale,
    sequence,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    shadowed,
    token_loss,
    token_mean,
    token_sum,
    unclipped,
)
from tests.losses.cases import (
    OBJECTIVES,
    RECIPES,
    ROW_LENGTH,
    ROWS,
    TERMS,
    Answer,
    lay_out,
    places,
    random_sequences,
)

AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "fixed_length": fixed_length(8),
    "token_sum": token_sum,
}
# Every term once, every aggregation once, and every recipe.
CASES = (
    {f"term: {name}": objective(term, sequence_mean_token_mean) for name, term in TERMS.items()}
    | {name: objective(clipped(over_sampler), how) for name, how in AGGREGATIONS.items()}
    | OBJECTIVES
    | {f"recipe: {name}": recipe.objective for name, recipe in RECIPES.items()}
)
UNPACKED = [[i] for i in range(ROWS)]

quick = settings(max_examples=10, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**32 - 1)


DIFFERENTIATED = ("logprobs", "entropy", "observed")


def evaluate(case, scores, batch, used):
    """((total, metrics) of the rows in use, gradients), denominator of the whole batch."""
    reduced = CASES[case]
    whole, before = reduced.survey(scores, batch)
    denominators = reduced.denominators(batch, whole.whole)
    part = batch.replace(
        segments=jnp.where(used[:, None], batch.segments, 0),
        action_mask=used[:, None] & batch.action_mask,
    )

    def total(*arrays):
        given = whole.replace(**dict(zip(DIFFERENTIATED, arrays, strict=True)))
        value, metrics = reduced.total(given, part, denominators=denominators)
        return value, before | metrics

    arrays = [getattr(scores, name) for name in DIFFERENTIATED]
    both = jax.value_and_grad(total, tuple(range(len(arrays))), has_aux=True)(*arrays)
    return both, denominators[0]


@functools.cache
def evaluator(cases):
    return jax.jit(lambda *given: [evaluate(case, *given) for case in cases])


def evaluated(sequences, rows, *, cases=tuple(CASES), used=None, **layout):
    """For each case total, denominator, metrics, and each sequence's gradient in any layout."""
    found = {}
    scores, batch = lay_out(sequences, rows, **layout)
    used = np.ones(len(batch.tokens), bool) if used is None else used
    results = jax.device_get(evaluator(cases)(scores, batch, used))
    for case, (((total, metrics), grads), denominator) in zip(cases, results, strict=True):
        mine = {i: np.stack([g[index] for g in grads]) for i, index in places(sequences, rows)}
        everywhere, inside = (sum(np.abs(g).sum() for g in x) for x in (grads, mine.values()))
        np.testing.assert_allclose(everywhere, inside, rtol=1e-5, err_msg=str(case))
        found[case] = (total, denominator, to_floats(metrics), mine)
    return found


def assert_same(results, expected):
    for case in results:
        a, b = results[case], expected[case]
        np.testing.assert_allclose(a[0], b[0], rtol=2e-5, atol=1e-5, err_msg=str(case))
        assert a[1] == b[1], case
        assert a[2] == pytest.approx(b[2], rel=1e-5, abs=1e-6), case
        assert_same_gradients(a[3], b[3], case)


def assert_same_gradients(grads, expected, case):
    assert grads.keys() == expected.keys()
    for i, grad in grads.items():
        np.testing.assert_allclose(grad, expected[i], rtol=1e-5, atol=1e-6, err_msg=str(case))


@quick
@given(seed=seeds)
def test_layout_changes_nothing(seed):
    """Packed == unpacked == permuted, and scores at padding are not read."""
    sequences = random_sequences(seed)
    unpacked = evaluated(sequences, UNPACKED)
    rows = assign_rows([s.rollout.length for s in sequences], row_length=ROW_LENGTH)
    assert_same(evaluated(sequences, rows), unpacked)
    order = np.random.default_rng(seed).permutation(ROWS)
    assert_same(evaluated(sequences, [[i] for i in order], padding=100.0), unpacked)


@quick
@given(seed=seeds)
def test_a_masked_token_is_as_if_absent(seed):
    """One that the policy did not choose changes nothing, for every term and every recipe."""
    sequences = random_sequences(seed)
    whole = evaluated(sequences, UNPACKED)
    found = evaluated([without_masked(s) for s in sequences], UNPACKED)
    for case, (total, denominator, metrics, grads) in whole.items():
        if case == "observation nll":  # which is about these tokens
            continue
        kept = {i: grads[i][:, s.rollout.action_mask] for i, s in enumerate(sequences)}
        assert_same({case: found[case]}, {case: (total, denominator, metrics, kept)})


def without_masked(answer):
    mask, rollout = answer.rollout.action_mask, answer.rollout
    return Answer(
        rollout._replace(
            completion=rollout.completion[mask],
            logprobs=rollout.logprobs[mask],
            version=rollout.version[mask],
            action_mask=mask[mask],
        ),
        {name: score[mask] for name, score in answer.scores.items()},
        answer.advantages[mask],
    )


def test_longer_and_more_rows_change_nothing():
    sequences = random_sequences(7)
    cases = ("term: product", "fixed_length")
    wider = evaluated(sequences, UNPACKED, cases=cases, shape=(ROWS + 1, ROW_LENGTH + 9))
    assert_same(wider, evaluated(sequences, UNPACKED))


@quick
@given(seed=seeds, cut=st.integers(0, ROWS))
def test_microbatches_add_up_to_the_whole(seed, cut):
    sequences = random_sequences(seed)
    whole = evaluated(sequences, UNPACKED)
    first = np.arange(ROWS) < cut
    parts = [evaluated(sequences, UNPACKED, used=used) for used in (first, ~first)]
    for case in CASES:
        totals, _, _, grads = zip(*(part[case] for part in parts), strict=True)
        np.testing.assert_allclose(sum(totals), whole[case][0], rtol=2e-5, atol=1e-5)
        added = {i: grads[0][i] + grads[1][i] for i in grads[0]}
        assert_same_gradients(added, whole[case][3], case)


@jax.jit
def combine(scores, batch, factors):
    """Each term with the next one: both values, a sum written in two ways, the values' own."""
    found = []
    for first, second in zip(TERMS.values(), [*list(TERMS.values())[1:], reinforce()], strict=True):
        first, second = prefix(first, "first/"), prefix(second, "second/")
        (a, mine), (b, others) = first.apply(scores, batch), second.apply(scores, batch)
        value, metrics = (factors[0] * first + factors[1] * second).apply(scores, batch)
        same, _ = add(scale(first, factors[0]), scale(second, factors[1])).apply(scores, batch)
        assert metrics.keys() == mine.keys() | others.keys()
        found.append((a, b, value, same))
    return found


@quick
@given(seed=seeds, factors=st.tuples(*[st.floats(-3, 3, width=32)] * 2))
def test_add_and_scale_are_linear(seed, factors):
    scores, batch = lay_out(random_sequences(seed), UNPACKED)
    for a, b, value, same in combine(scores, batch, jnp.asarray(factors, jnp.float32)):
        expected = factors[0] * np.asarray(a) + factors[1] * np.asarray(b)
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(value, same)


def test_needs_are_those_of_all_terms():
    combined = TERMS["dual"] + 0.1 * TERMS["k3"] + TERMS["token tis"] + 0.5 * TERMS["entropy"]
    assert combined.needs == {"anchor", "reference", "entropy"}


def test_two_metrics_of_one_name_are_refused():
    scores, batch = one_sequence(advantages=[1.0], logprobs=-1.0)
    with pytest.raises(ValueError, match=r"'ratio/kl'.*prefix"):
        jax.eval_shape((reinforce() + clipped(over_sampler)).apply, scores, batch)


def test_objective_reduces_once():
    with pytest.raises(TypeError, match="aggregation happens once"):
        objective(objective(reinforce(), token_mean), token_mean)


def test_gradient_at_ratio_one_is_reinforce():
    @jax.jit
    def gradients(scores, batch):
        def gradient(term, aggregation):
            total = objective(term, aggregation).total
            return jax.grad(lambda lp: total(scores.replace(logprobs=lp), batch)[0])(
                scores.logprobs
            )

        return [
            (gradient(term(ratio), token_mean), gradient(reinforce(), token_mean))
            for term in (
                clipped,
                functools.partial(clipped, low=0.0003, high=0.0004),
                functools.partial(clipped, dual=3.0, cap=4.0),
                unclipped,
            )
            for ratio in (over_sampler, over_anchor, shadowed, sequence(over_sampler))
        ]

    sequences = random_sequences(3, spread=0.0)
    for gradient, expected in gradients(*lay_out(sequences, UNPACKED)):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", [lambda ratio: ratio, sequence, geometric])
def test_levels_agree_on_sequences_of_one_token(level):
    scores, batch = one_sequence(advantages=[2.0], logprobs=[-1.0], sampler=[-1.1])
    total = objective(clipped(level(over_sampler)), token_mean).total
    gradient = jax.jit(jax.grad(lambda lp: total(scores.replace(logprobs=lp), batch)[0]))
    np.testing.assert_allclose(gradient(scores.logprobs), [[-2 * np.exp(0.1)]], rtol=1e-6)


@pytest.mark.parametrize("shift", [100.0, -100.0])
def test_extreme_log_ratios_stay_finite(shift):
    sequences = random_sequences(11)
    for i, s in enumerate(sequences):
        s.scores["logprobs"][:] += np.float32(-shift if i % 2 else shift)
    for case, (total, _, metrics, grads) in evaluated(sequences, UNPACKED).items():
        assert np.isfinite([total, *metrics.values()]).all(), case
        assert all(np.isfinite(g).all() for g in grads.values()), case


def test_tokens_without_weight_may_lose_infinitely():
    """Such as a term of the user's that divides by zero where the policy did not choose."""
    infinite = token_loss(lambda scores, batch: (-scores.logprobs / batch.advantages, {}))
    keep = Weights(frozenset(), lambda scores, batch: (batch.sampler_logprobs, {}))
    scores, batch = one_sequence(
        advantages=[1.0, 2.0, 0.0],
        logprobs=-1.0,
        sampler=[1.0, 1.0, 0.0],
        action_mask=[True, True, False],
    )
    everywhere = batch.replace(action_mask=jnp.ones((1, 3), bool))
    for term, data, tokens in ((infinite, batch, 2), (reweight(infinite, keep), everywhere, 3)):
        total, _ = jax.jit(objective(term, sequence_mean_token_mean).total)(scores, data)
        assert total == pytest.approx(1.5 / tokens)


def test_batch_without_action_tokens_is_zero():
    sequences = random_sequences(5)
    for s in sequences:
        s.rollout.action_mask[:] = False
    for case, (total, denominator, metrics, grads) in evaluated(sequences, UNPACKED).items():
        assert (total, metrics) == (0.0, {}), case
        assert denominator == (1.0 if case == "token_sum" else 0.0)
        assert all((g == 0).all() for g in grads.values()), case


def test_masked_tokens_are_not_read():
    sequences = random_sequences(9)
    clean = evaluated(sequences, UNPACKED)
    for s in sequences:
        s.rollout.logprobs[~s.rollout.action_mask] = np.nan
        s.advantages[~s.rollout.action_mask] = np.nan
    assert_same(evaluated(sequences, UNPACKED), clean)
