"""Controllers: their next coefficient by hand, and how it enters a loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses import (
    EntropyController,
    KLController,
    controlled,
    entropy_bonus,
    grpo,
    one_sequence,
    with_terms,
)


def test_controlled_term_is_scaled_by_its_coefficient():
    scores, batch = one_sequence(advantages=[0.0] * 2, logprobs=-1.0, entropy=[0.5, 1.5])
    term = controlled(entropy_bonus(), "entropy")
    given = batch.replace(coefficients={"entropy": jnp.full((1, 2), 0.1)})
    loss, metrics = jax.jit(term.apply)(scores, given)
    np.testing.assert_allclose(loss, [[-0.05, -0.15]], rtol=1e-6)
    assert metrics["entropy"].value == 1.0  # as it is
    with pytest.raises(ValueError, match=r"batch\.coefficients has no 'entropy'.*entropy_target="):
        term.apply(scores, batch)


def test_entropy_controller_follows_its_target():
    controller = EntropyController(initial=0.01, target=0.2, step=0.005)
    assert controller.next(0.01, measured=0.1) == pytest.approx(0.015)
    assert controller.next(0.01, measured=0.3) == pytest.approx(0.005)
    assert controller.next(0.002, measured=0.3) == 0.0
    assert controller.next(0.999, measured=0.1) == 1.0


@pytest.mark.parametrize(
    ("measured", "factor"), [(0.05, 1.0), (0.055, 1.01), (0.045, 0.99), (9.0, 1.02), (-9.0, 0.98)]
)
def test_kl_controller_follows_clipped_relative_error(measured, factor):
    controller = KLController(initial=0.01, target=0.05, step=0.1)
    assert controller.next(0.3, measured=measured) == pytest.approx(0.3 * factor)


@pytest.mark.parametrize("measured", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "controller", [KLController(initial=0.01, target=0.05), EntropyController(target=0.2)]
)
def test_a_measurement_that_is_not_finite_changes_no_coefficient(controller, measured):
    """A forward pass that overflows makes the metric NaN; its step is skipped, the run goes on."""
    assert controller.next(0.3, measured=measured) == 0.3


def test_target_adds_a_controller():
    recipe = with_terms(grpo(), kl=0.01, kl_target=0.05, entropy_target=0.2)
    assert list(recipe.controllers) == ["kl", "entropy"]
    assert recipe.controllers["kl"] == KLController(initial=0.01, target=0.05)
    assert recipe.controllers["entropy"] == EntropyController(initial=0.0, target=0.2)
    assert recipe.objective.needs == {"reference", "entropy"}
    with pytest.raises(ValueError, match=r"kl, with kl_target,=0\.0 must be > 0"):
        with_terms(grpo(), kl_target=0.05)
