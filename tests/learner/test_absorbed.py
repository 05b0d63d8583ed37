"""Updates that rounding to the parameters' dtype takes away."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxrl.core.metrics import to_floats
from jaxrl.core.precision import PRESETS, Precision
from jaxrl.diagnostics import History
from jaxrl.learner.rounding import _sums, _sums_by_sign, reporting_publish
from jaxrl.training.absorbed import absorbed_note
from tests import tiny
from tests.learner.test_policy import learner, minibatch

BF16 = PRESETS["bf16"]


def update(grads, size, params=None):
    """Moves each parameter by `size`, the state, except the norms, by 0."""
    return jax.tree.map(lambda g: jnp.full_like(g, size if g.ndim > 2 else 0), grads), size


CONSTANT = optax.GradientTransformation(lambda params: jnp.float32(3e-4), update)


@pytest.mark.parametrize("size", [1e-6, 1e-4, 3e-3])
def test_the_share_is_counted_in_numpy(size):
    one = learner(precision=BF16, optimizer=CONSTANT)
    moved = jnp.asarray(size, BF16.moments)
    state = dataclasses.replace(one.init(tiny.params()), opt_state=moved)
    after, metrics = one.step(state, minibatch(rows_per_microbatch=2))
    before = [np.asarray(x) for x in jax.tree.leaves(state.params) if x.ndim > 2]
    lost = [x == (x.astype(np.float32) + np.float32(moved)).astype(x.dtype) for x in before]
    expected = np.concatenate([x.ravel() for x in lost]).mean()
    assert to_floats(metrics)["update/absorbed"] == pytest.approx(expected, abs=1e-6)
    assert {1e-6: expected > 0.9, 1e-4: True, 3e-3: expected < 0.5}[size]
    kept = [np.asarray(x) for x in jax.tree.leaves(after.params) if x.ndim > 2]
    same = np.concatenate([(a == b).ravel() for a, b in zip(before, kept, strict=True)])
    assert same.mean() == pytest.approx(expected, abs=1e-6)


def for_chips(*operands, default, **_):
    return default(*operands)


@pytest.mark.parametrize(
    ("text", "platform"),
    [("phantom", "chip"), ("phantom", "cpu"), ("phantom,wire=f8_e4m3", "cpu"), ("bf16", "cpu")],
)
def test_published_words_are_counted_in_numpy(text, platform, monkeypatch):
    """Words of a copy that is rounded twice, against numpy's own rounding; each parameter moves by
    another size."""
    if platform == "chip":
        monkeypatch.setattr(lax, "platform_dependent", for_chips)
    precision = Precision.of(text)
    one = learner(precision=precision, optimizer=CONSTANT)
    reporting = reporting_publish(
        one.step, params_of=lambda state: state.params, precision=precision
    )
    state = one.init(tiny.params())
    batch = minibatch(rows_per_microbatch=2)
    after, metrics = reporting(state, batch)
    found, expected = to_floats(metrics), {"moved": 0.0, "words": 0.0, "lost": 0.0, "whole": 0.0}
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        old, new = (np.asarray(x, np.float32) for x in (a, b))
        rounded = [x.astype(precision.wire).astype(precision.sampler) for x in (old, new)]
        same = rounded[0].astype(np.float32) == rounded[1].astype(np.float32)
        squares = (new - old).astype(np.float64) ** 2
        expected["moved"] += np.sum(~same)
        expected["words"] += same.size
        expected["lost"] += squares[same].sum()
        expected["whole"] += squares.sum()
    assert 0 < found["publish/changed"] < 1
    assert found["publish/changed"] == pytest.approx(expected["moved"] / expected["words"])
    share = expected["lost"] / expected["whole"]
    assert found["publish/absorbed"] == pytest.approx(
        share, rel=1e-3 if platform == "chip" else 1e-4
    )
    assert (share == 0) == (text == "bf16")  # the parameters are what is published
    rest = {name: x for name, x in found.items() if not name.startswith("publish/")}
    assert rest == to_floats(one.step(state, batch)[1])


def test_comparison_on_chips_differs_by_the_rounding_of_squares():
    rng = np.random.default_rng(0)
    squares = rng.normal(size=(64, 128)).astype(np.float32) ** 2
    same = rng.random((64, 128)) < 0.3
    squares[0], same[1] = 0, False  # nothing moved; a word may change by less than f32 can square
    squares[1] = 0
    found, expected = _sums_by_sign(squares, same), _sums(squares, same)
    assert found[:2] == expected[:2]
    np.testing.assert_allclose(found[2:], expected[2:], rtol=1e-3)


def test_a_policy_that_is_sampled_as_it_is_has_no_rounding_to_report():
    step = learner().step
    assert reporting_publish(step, params_of=lambda s: s.params, precision=PRESETS["fp32"]) is step


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
