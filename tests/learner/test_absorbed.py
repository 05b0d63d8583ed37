"""Updates that rounding to the parameters' dtype takes away."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.core.metrics import to_floats
from jaxrl.core.precision import PRESETS
from jaxrl.diagnostics import History
from jaxrl.training.absorbed import absorbed_note
from tests import tiny
from tests.learner.test_policy import learner, minibatch

BF16 = PRESETS["bf16"]


def constant(size):
    """Moves each parameter by `size`, except the norms, by 0."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: jnp.full_like(g, size if g.ndim > 2 else 0), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("size", [1e-6, 1e-4, 3e-3])
def test_the_share_is_counted_in_numpy(size):
    one = learner(precision=BF16, optimizer=constant(size))
    state = one.init(tiny.params())
    after, metrics = one.step(state, minibatch(rows_per_microbatch=2))
    before = [np.asarray(x) for x in jax.tree.leaves(state.params) if x.ndim > 2]
    lost = [x == (x.astype(np.float32) + np.float32(size)).astype(x.dtype) for x in before]
    expected = np.concatenate([x.ravel() for x in lost]).mean()
    assert to_floats(metrics)["update/absorbed"] == pytest.approx(expected, abs=1e-6)
    assert {1e-6: expected > 0.9, 1e-4: True, 3e-3: expected < 0.5}[size]
    kept = [np.asarray(x) for x in jax.tree.leaves(after.params) if x.ndim > 2]
    same = np.concatenate([(a == b).ravel() for a, b in zip(before, kept, strict=True)])
    assert same.mean() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["fp32", "bf16_master"])
def test_weights_of_32_bits_are_not_measured(name):
    one = learner(precision=PRESETS[name])
    shapes = jax.eval_shape(one.step, one.init(tiny.params()), minibatch(rows_per_microbatch=2))
    assert "update/absorbed" not in shapes[1]


def test_one_line_says_so():
    history = History([{"step": 0, "eval/accuracy": 0.1}])
    note = absorbed_note({"update/absorbed": 0.997}, history, precision=BF16)
    assert note is not None
    assert "params=bf16 takes away 99.7% of their updates" in note
    assert "use precision = 'bf16_master'" in note
    assert absorbed_note({"update/absorbed": 0.2}, history, precision=BF16) is None
    assert absorbed_note({"loss": 0.2}, history, precision=BF16) is None
    history.add({"step": 1, "update/absorbed": 0.997})
    assert absorbed_note({"update/absorbed": 0.997}, history, precision=BF16) is None
