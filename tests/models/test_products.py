"""Every product follows the dtype policy: in the source, as lowered and as compiled."""

import ast
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl
from jaxrl.core import casts
from jaxrl.core.compiled import jit
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import PRESETS, check_products, parse, sampler_precision
from jaxrl.learner.policy import make_learner
from jaxrl.losses import grpo
from jaxrl.models import spec
from jaxrl.models.model import decoder
from jaxrl.models.products import grouped_product, matmul, product, transposed_product
from jaxrl.sampling.embedded.kv_cache import decode_step, prefill
from tests import tiny

SOURCE = Path(jaxrl.__file__).parent
MULTIPLIES = {"dot", "dot_general", "einsum", "matmul", "ragged_dot", "ragged_dot_general", "vdot"}


def test_no_product_is_made_elsewhere():
    found = []
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "models/products.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Attribute) and node.attr in MULTIPLIES
            if called and isinstance(node.value, ast.Name) and node.value.id in ("jnp", "lax"):
                found.append(f"{path}:{node.lineno}")
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                found.append(f"{path}:{node.lineno}")
    assert not found, "use models/products.py, which follows the dtype policy"


def test_every_program_is_compiled_with_options():
    # A jit within another program has none of its own, and initial values are rounded once. The
    # flags are tried on a program of their own.
    nested = {"models/lora.py", "models/spec.py", "core/compiled.py", "learner/update.py"}
    nested |= {"core/compiler_flags.py", "models/attention/splash_forward.py"}
    found = [
        str(path)
        for path in SOURCE.rglob("*.py")
        if re.search(r"jax\.jit(?!`)", path.read_text())
        and str(path.relative_to(SOURCE)) not in nested
    ]
    assert not found, "use compiled.jit, which keeps every rounding"


def programs(precision, config=tiny.CONFIG):
    """The learner's step and scores, prefill and a decode step, as (function, arguments)."""
    model = decoder(config)
    params = spec.init(model.specs, jax.random.key(0), dtype=precision.params)
    learner = make_learner(model, grpo().objective, optimizer=optax.sgd(0.1), precision=precision)
    rollouts = tiny.rollouts(4)
    shape = MinibatchShape(row_length=64, rows_per_microbatch=2, max_rows=4)
    minibatch = pack_minibatch(rollouts, [1.0] * 4, shape=shape)
    sampler = sampler_precision(precision)
    served = casts.cast(params, sampler.compute)
    static = {"model": model, "precision": sampler}
    tokens, lengths = np.ones((4, 16), np.int32), np.full(4, 9, np.int32)
    cache = jax.eval_shape(
        lambda: prefill.__wrapped__(served, tokens, lengths, **static, record_experts=False)[0]
    )
    step = partial(decode_step, **static)
    return {
        "step": (learner.step, (learner.init(params), minibatch)),
        "score": (learner.score, (params, minibatch)),
        "prefill": (
            partial(prefill.__wrapped__, **static, record_experts=False),
            (served, tokens, lengths),
        ),
        "decode": (
            lambda w, c, t, p: step(w, c, t, positions=p),
            (served, cache, np.ones(4, np.int32), lengths),
        ),
    }


SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@pytest.mark.parametrize("name", PRESETS)
def test_compiled_products_follow_the_precision(name):
    precision = PRESETS[name]
    for program, (function, arguments) in programs(precision).items():
        side = precision if program in ("step", "score") else sampler_precision(precision)
        text = jit(function).lower(*arguments).compile().as_text()
        assert text is not None
        types = dict(re.findall(r"%(\S+) = (\w+)\[", text)) | dict(
            re.findall(r"(\w[\w.]*): (\w+)\[", text)
        )
        dots = [line for line in text.splitlines() if " dot(" in line]
        assert len(dots) >= 8
        for line in dots:
            assert "operand_precision={highest,highest}" in line, (program, line)
            operands = re.findall(r"dot\(%(\S+), %(\S+)\)", line)[0]
            # The CPU may widen an operand for its kernel; it must never narrow one.
            width = {types[x] for x in operands}
            assert width <= {SHORT[side.compute.name], "f32"}, (program, line)


@pytest.mark.parametrize(("name", "dtype"), [("bf16_master", "f32"), ("bf16", "bf16")])
def test_accelerators_sum_gradients_over_devices_in_grads(name, dtype):
    """A device's part of a sum has the dtype of its product."""
    precision = parse(name)

    def gradient(x, weight, dy):
        return jax.vjp(lambda w: matmul(x, w, precision=precision), weight)[1](dy)

    shapes = [(256, 64), (128, 64), (256, 128)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.jit(gradient).trace(*arguments)
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        (found,) = re.findall(r"dot_general .*-> tensor<128x64x(\w+)>", text)
        assert found == dtype


def has_bf16_units() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "avx512_bf16" in cpu.read_text()


@pytest.mark.skipif(not has_bf16_units(), reason="XLA widens bf16 on a CPU without units for it")
def test_no_product_of_a_gradient_is_widened():
    precision = parse("bf16_master")

    def gradient(x, weight, dy):
        return jax.vjp(lambda *a: matmul(*a, precision=precision), x, weight)[1](dy)

    shapes = [(256, 64), (128, 64), (256, 128)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = jit(gradient).lower(*arguments).compile().as_text()
    assert text is not None
    kernels = [part for part in text.split("\n\n") if " dot(" in part]
    operands = [re.findall(r"param_[\d.]+: (\w+)\[", kernel) for kernel in kernels]
    assert operands == [["bf16", "bf16"]] * 2


@pytest.mark.parametrize("widths", [(32, 64), (64, 32)])
@pytest.mark.parametrize("name", ["fp32", "bf16_master", "fp16_master"])
def test_a_transposed_product_may_be_transposed(name, widths):
    # XLA turns transpose(x.T @ y) into y.T @ x, and fails at run time if the operands are bf16.
    precision = parse(name)
    x, y = (jax.random.normal(jax.random.key(i), (2, 96, n)) for i, n in enumerate(widths))
    x, y = (array.astype(precision.compute) for array in (x, y))

    def transpose(x, y):
        return transposed_product(x, y, batch=(0,), precision=precision).swapaxes(1, 2)

    expected = np.swapaxes(np.asarray(y, np.float32), 1, 2) @ np.asarray(x, np.float32)
    np.testing.assert_allclose(jit(transpose)(x, y), expected, atol=1e-4)


def test_a_rounding_between_two_operations_is_kept():
    def rounded(x):
        return (x * 3).astype(jnp.bfloat16).astype(jnp.float32) + 1

    x = jnp.linspace(0.0, 1.0, 1000)
    expected = np.asarray(x * 3).astype(jnp.bfloat16).astype(np.float32) + 1
    np.testing.assert_array_equal(jit(rounded)(x), expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp32", "precision = [HIGHEST, HIGHEST]"),
        ("fp16_master", "precision = [HIGHEST, HIGHEST]"),
        ("fp32,products=tf32", "algorithm = <lhs_precision_type = tf32"),
        ("fp32,products=bf16x3", "num_primitive_operations = 3"),
    ],
)
def test_lowered_products_name_their_algorithm(text, said):
    precision = parse(text)
    for program, (function, arguments) in programs(precision).items():
        traced = jax.jit(function).trace(*arguments)
        for platform in ("cuda", "tpu"):
            lowered = traced.lower(lowering_platforms=(platform,))
            dots = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
            assert len(dots) >= 8
            assert all(said in line for line in dots), (program, platform)


@pytest.mark.parametrize(
    ("products", "kept"),
    [
        ("bf16", 0.0039),
        ("tf32", 4.9e-4),
        ("bf16x3", 1.6e-5),
        ("tf32x3", 2.4e-7),
        ("bf16x6", 1.2e-7),
        ("bf16x9", 1.2e-7),
    ],
)
def test_a_cpu_multiplies_the_parts_of_operands(products, kept):
    """One term a sum: each result against the parts in f64, which numpy rounds by whole numbers."""
    x, y = (np.asarray(jax.random.normal(jax.random.key(i), (n, 1))) for i, n in ((0, 40), (1, 50)))
    units, _, terms = products.partition("x")
    count, last = {"": (1, 0), "3": (2, 1), "6": (3, 2), "9": (3, 4)}[terms]

    def parts(a):
        found = []
        for _ in range(count):
            words, low = a.view(np.uint32).astype(np.uint64), 16 if units == "bf16" else 13
            even = (words >> low) & 1
            cut = ((words + (1 << (low - 1)) - 1 + even) >> low) << low
            found.append(cut.astype(np.uint32).view(np.float32))
            a = a - found[-1]
        return found

    expected = sum(
        np.float64(left) @ np.float64(right).T
        for i, left in enumerate(parts(x))
        for j, right in enumerate(parts(y))
        if i + j <= last
    )
    precision = parse(f"fp32,products={products}")
    check_products(precision, "cpu")
    found = jit(partial(product, contract=(1, 1), precision=precision))(x, y)
    np.testing.assert_allclose(found, expected, rtol=2e-7)
    exact = np.float64(x) @ np.float64(y).T
    error = np.max(np.abs(found - exact) / np.abs(exact))
    assert kept / 4 < error < 2 * kept


def test_products_that_the_partitioner_drops_are_refused():
    precision = parse("fp32,products=bf16x3")
    check_products(precision, "tpu")
    with pytest.raises(ValueError, match="XLA cannot divide products=bf16x3 over 4 devices"):
        check_products(precision, "tpu", devices=4)
    check_products(parse("fp32"), "tpu", devices=4)


def test_f64_without_64_bits_is_refused():
    """JAX would compute in f32, and numbers of f64 in a program would be infinite there."""
    precision = parse("fp32,logits=f64")
    with pytest.raises(ValueError, match="logits=f64 needs JAX_ENABLE_X64=1"):
        check_products(precision, "cpu")
    with jax.enable_x64(True):
        check_products(precision, "cpu")


def test_experts_refuse_products_that_their_kernel_ignores():
    precision = parse("fp32,products=tf32")
    x, y = jnp.zeros((4, 6)), jnp.zeros((2, 3, 6))
    with pytest.raises(ValueError, match="products=tf32 is not available for a mixture"):
        grouped_product(x, y, jnp.array([2, 2]), contract=(1, 2), precision=precision)


@pytest.mark.parametrize(("name", "said"), [("bf16_master", False), ("fp32", True)])
def test_grouped_bf16_products_use_default_precision(name, said):
    # They are exact in any case, and the TPU's kernel does not compile if it is asked.
    precision = parse(name)

    def grouped(x, y):
        return grouped_product(x, y, jnp.array([2, 2]), contract=(1, 2), precision=precision)

    traced = jax.jit(grouped).trace(jnp.zeros((4, 6)), jnp.zeros((2, 3, 6)))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("HIGHEST" in text) is said


def test_grouped_products_are_those_of_each_group():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((10, 6), (3, 4, 6)))
    sizes = jnp.array([4, 0, 5], jnp.int32)
    f32 = PRESETS["fp32"]
    z = jit(lambda x, y: grouped_product(x, y, sizes, contract=(1, 2), precision=f32))(x, y)
    expected = np.concatenate([x[:4] @ y[0].T, x[4:9] @ y[2].T])
    np.testing.assert_allclose(z[:9], expected, rtol=1e-5, atol=1e-6)
    rows = jnp.asarray(rng.normal(size=(10, 4)), jnp.float32)
    stacked = jit(
        lambda x, y: grouped_product(x, y, sizes, contract=(0, 0), group=(), precision=f32)
    )(x, rows)
    expected = np.stack([x[:4].T @ rows[:4], np.zeros((6, 4)), x[4:9].T @ rows[4:9]])
    np.testing.assert_allclose(stacked, expected, rtol=1e-5, atol=1e-6)


def test_single_row_product_sums_like_many():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 96), (64, 96)))
    function = jit(partial(product, contract=(1, 1), precision=PRESETS["fp32"]))
    np.testing.assert_array_equal(function(x[:1], y), function(x, y)[:1])


@pytest.mark.parametrize("width", [64, 128])
def test_long_fixed_sums_ignore_row_count(width):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=s).astype(np.float32) for s in ((128, 1100), (1100, width)))
    fixed = parse("fp32,sums=fixed")
    function = jit(partial(product, contract=(1, 0), precision=fixed), sums="fixed")
    masked = x.copy()
    masked[:, :512] = 0
    for rows in (1, 4, 32):
        np.testing.assert_array_equal(function(x[:rows], y)[:1], function(x, y)[:1])
        short = function(x[:rows, 512:], y[512:])[:1]
        np.testing.assert_array_equal(short, function(masked, y)[:1])
