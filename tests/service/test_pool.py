"""Tenants in one batch: each one's losses, gradients and weights are those of training alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxrl.core import Precision, cast
from jaxrl.models import decoder, lora
from jaxrl.service import answers, stacks
from jaxrl.service.backends import Embedded
from jaxrl.service.files import read_tenant, served, write_tenant
from jaxrl.service.pool import ALPHA, Base, Kind, Pool
from jaxrl.service.sampling import Request, Samplers
from jaxrl.service.scoring import Asked
from jaxrl.service.serving import kernel_for_tenants
from jaxrl.service.wire import Batch, Datum
from jaxrl.sharding import PRESETS, Layout, make_mesh, place
from tests import tiny
from tests.service.drawing import drawn

SETTINGS = dict(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5
)
# With a small eps Adam divides rounding by rounding where a gradient is 0.
CONDITIONED = SETTINGS | {"eps": 1e-2}
KIND = Kind(4, unembed=True)
ONE = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["all"])


def batch(seed: int, *lengths: int, forward_only: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(2, 60, length + 1).astype(np.int32)
        weights = rng.normal(1, 0.5, (length, 1)).astype(np.float32)
        data.append(Datum(tokens[:-1], tokens[1:, None], {"weights": weights}, True))
    return Batch(data, "cross_entropy", forward_only)


@pytest.fixture(scope="module")
def base() -> Base:
    return base_of("fp32")


def base_of(policy: str) -> Base:
    precision = Precision.of(policy)
    return Base(tiny.model(), cast(tiny.params(), precision.wire), precision, ONE)


def pool_of(base: Base, *names: str, tokens: int = 1024, kind: Kind = KIND) -> Pool:
    pool = Pool(base, kind, tokens=tokens)
    for seed, name in enumerate(names):
        pool.add(name, pool.fresh(seed))
    return pool


def samplers_of(base: Base, layout: Layout | None = None) -> Samplers:
    backend = Embedded(base, max_batch=8, layout=layout)
    return Samplers(base, tokenizer=None, end_ids=(), load=None, backend=backend)


def trees_close(first, second, *, within=1e-5):
    """Compares arrays within a share of their largest number, at least 1."""

    def close(a, b):
        limit = within * max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=limit)

    jax.tree.map(close, first, second)


@pytest.mark.parametrize(("policy", "within"), [("fp32", 1e-5), ("fp32,sums=fixed", 0)])
def test_eight_tenants_are_as_each_alone(policy, within):
    base, names = base_of(policy), [f"t{i}" for i in range(8)]
    together, alone = pool_of(base, *names), pool_of(base)
    requests = [(name, batch(i, 10 + i, 5)) for i, name in enumerate(names)]
    for _ in range(2):
        found = together.compute(requests)
        for name in names:
            together.step(name, CONDITIONED)
    for seed, name in enumerate(names):
        alone.add(name, alone.fresh(seed))
        for _ in range(2):
            own = alone.compute([requests[seed]])
            alone.step(name, CONDITIONED)
        trees_close(found[seed], own[0], within=within)
        trees_close(together.read(name), alone.read(name), within=within)
        alone.remove(name)
    expected, lost = together.compute(requests), together.read(names[0])
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), lost.state.params)
    state = dataclasses.replace(lost.state, params=broken)
    together.write(names[0], lost._replace(state=state))
    found = together.compute(requests)
    assert np.isnan(found[0].logprobs[0]).all()
    trees_close(found[1:], expected[1:], within=0)
    for name in names[1:]:
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(together.read(name).gradients))


@pytest.mark.parametrize("policy", ["fp32,sums=fixed", "bf16_master,sums=fixed"])
def test_with_fixed_sums_learner_and_sampler_are_equal(policy):
    """So are a datum alone and among others, whatever the microbatch."""
    base = base_of(policy)
    pool = pool_of(base, "a")
    for seed in range(2):
        pool.compute([("a", batch(seed, 12))])
        pool.step("a", SETTINGS | {"learning_rate": 0.3})
    samplers = samplers_of(base)
    samplers.keep("w", served(pool, pool.weights("a")))
    prompts = [np.arange(2, 2 + n, dtype=np.int32) % 60 + 2 for n in (5, 70, 9)]
    asked = [Request("w", one, 2, 8, 1.0, 1.0, 0, (), 1, True, whole="w") for one in prompts]
    found = dict(drawn(samplers, asked))
    data, expected = [], []
    for number, prompt in enumerate(prompts):
        for sample in found[number].samples:
            tokens = np.concatenate([prompt, sample.tokens])
            weights = {"weights": np.ones((len(tokens) - 1, 1), np.float32)}
            data.append(Datum(tokens[:-1], tokens[1:, None], weights, True))
            scores = found[number].scores.logprobs[1:]  # of the prompt
            expected.append(np.concatenate([scores, sample.logprobs]))
    several = pool.compute([("a", Batch(data, "cross_entropy", True))])[0].logprobs
    parts = pool_of(base, "a", tokens=256)
    parts.write("a", pool.read("a"))
    apart = parts.compute([("a", Batch(data, "cross_entropy", True))])[0].logprobs
    first = pool.compute([("a", Batch(data[:1], "cross_entropy", True))])[0].logprobs
    for mine, other, theirs in zip(several, apart, expected, strict=True):
        np.testing.assert_array_equal(mine[:, 0], theirs)
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(first[0], several[0])


def test_sums_do_not_depend_on_the_microbatch(base):
    whole, parts = (pool_of(base, "a", tokens=tokens) for tokens in (4096, 64))
    data = batch(3, *range(20, 60, 6))
    first, second = whole.compute([("a", data)]), parts.compute([("a", data)])
    parts_of = Batch(data.data[:3], data.loss, False), Batch(data.data[3:], data.loss, False)
    trees_close(first, second)
    trees_close(whole.read("a").gradients, parts.read("a").gradients)
    apart = pool_of(base, "a")
    for one in parts_of:  # gradients add up until the step
        apart.compute([("a", one)])
    trees_close(whole.read("a").gradients, apart.read("a").gradients)
    before = apart.read("a").gradients
    apart.compute([("a", batch(3, 9, forward_only=True))])
    trees_close(before, apart.read("a").gradients, within=0)


def test_log_probs_are_those_of_the_merged_model(base):
    pool = pool_of(base, "a")
    pool.compute([("a", batch(0, 12))])
    pool.step("a", SETTINGS)
    adapted = lora.Adapted(pool.weights("a"), base.params, ALPHA)
    data = batch(1, 9)
    tokens = data.data[0].tokens[None]
    index, ones = np.arange(9, dtype=np.int32)[None], np.ones((1, 9), np.int32)
    merged = lora.merge(adapted)
    hidden = base.model.hidden(merged, tokens, index, ones, precision=base.precision)
    logits = np.asarray(hidden[0] @ base.model.unembedding(merged).T, np.float64)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = logits[np.arange(9), data.data[0].targets[:, 0]]
    found = pool.compute([("a", data)])[0].logprobs[0][:, 0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_several_targets_per_token_are_scored_like_single_ones(base):
    pool = pool_of(base, "a")
    one = batch(0, 9).data[0]
    other = np.random.default_rng(5).integers(2, 60, one.targets.shape).astype(np.int32)
    weights = {"weights": np.ones((9, 2), np.float32)}
    both = Datum(one.tokens, np.concatenate([one.targets, other], axis=1), weights, False)
    singles = [
        Datum(one.tokens, targets, {"weights": weights["weights"][:, :1]}, True)
        for targets in (one.targets, other)
    ]
    found = pool.compute([("a", Batch([both], "cross_entropy", True))])[0].logprobs[0]
    apart = pool.compute([("a", Batch(singles, "cross_entropy", True))])[0].logprobs
    np.testing.assert_allclose(found, np.concatenate(apart, axis=1), atol=1e-6)


def test_a_step_is_torchs_adamw(base):
    pool = pool_of(base, "a")
    flat, structure = jax.tree.flatten(pool.weights("a"))
    parameters = [torch.nn.Parameter(torch.tensor(np.asarray(x))) for x in flat]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for seed in range(3):
        pool.compute([("a", batch(seed, 12))])
        gradients = jax.tree.leaves(pool.read("a").gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(np.asarray(gradient))
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        pool.step("a", SETTINGS)
    expected = jax.tree.unflatten(structure, [x.detach().numpy() for x in parameters])
    trees_close(pool.weights("a"), expected, within=2e-5)
    assert not any(np.any(x) for x in jax.tree.leaves(pool.read("a").gradients))


def test_all_parameters_can_be_trained(base):
    pool = pool_of(base, "a", kind=Kind(0))
    data = batch(0, 12, 30)
    losses = []
    for _ in range(3):
        losses.append(sum(x.sum() for x in pool.compute([("a", data)])[0].losses))
        pool.step("a", SETTINGS)
    assert losses[2] < losses[0]


def test_a_state_on_disk_is_the_state(base, tmp_path):
    pool = pool_of(base, "a")
    pool.compute([("a", batch(0, 12))])
    tenant = pool.read("a")
    write_tenant(tmp_path / "a.npz", tenant, seq=7)
    found, seq = read_tenant(tmp_path / "a.npz", like=pool.fresh(1))
    assert seq == 7
    trees_close(found, tenant, within=0)


def test_large_arrays_are_fetched_in_parts(monkeypatch):
    monkeypatch.setattr(stacks, "_LARGE", 32)
    tree = {"large": jnp.arange(24.0).reshape(4, 3, 2), "small": jnp.arange(4.0)}
    trees_close(stacks.to_host(tree, keep=True), tree, within=0)
    assert stacks.to_host(tree, keep=False)["large"] is None


@pytest.mark.parametrize("kind", [KIND, Kind(0)], ids=["adapters", "all"])
def test_a_mesh_computes_what_one_device_computes(base, kind):
    layout = Layout(make_mesh(data=2, fsdp=2, tensor=2), PRESETS["all"])
    model = decoder(tiny.CONFIG, layout=layout)
    cut = Base(model, place(base.params, layout.tree(model.specs)), base.precision, layout)
    names = ["a", "b"][: 2 if kind.rank else 1]
    alone, several = pool_of(base, *names, kind=kind), pool_of(cut, *names, kind=kind)
    requests = [(name, batch(i, 20, 7, 30)) for i, name in enumerate(names)]
    for _ in range(2):
        expected, found = alone.compute(requests), several.compute(requests)
        for name in names:
            several.step(name, CONDITIONED)
            alone.step(name, CONDITIONED)
    trees_close(found, expected)
    for name in names:
        trees_close(several.read(name), alone.read(name))
    several.remove(names[0])
    several.add("c", alone.read(names[0]))
    trained = several.specs.adapters if kind.rank else several.specs
    expected_shardings = jax.tree.leaves(layout.tree(trained))
    for x, one in zip(jax.tree.leaves(several.weights("c")), expected_shardings, strict=True):
        assert x.sharding.is_equivalent_to(one, x.ndim)
    if not kind.rank:
        return
    samplers = [samplers_of(one, None if one is base else layout) for one in (base, cut)]
    for own, pool, name in zip(samplers, (alone, several), (names[0], "c"), strict=True):
        own.keep("w", served(pool, pool.weights(name)))
    asked = Request("w", np.arange(2, 9, dtype=np.int32), 2, 5, 0.0, 1.0, 0, (), 1, True)
    asked = asked._replace(asked=Asked(top=3))
    first, second = (next(drawn(own, [asked]))[1] for own in samplers)
    np.testing.assert_allclose(second.scores.logprobs, first.scores.logprobs, atol=1e-5)
    for one, other in zip(second.samples, first.samples, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_attention_of_tenants_on_a_gpu_is_not_cudnn():
    assert kernel_for_tenants("auto", platform="gpu") == "xla"
    assert kernel_for_tenants("auto", platform="tpu") == "auto"
    with pytest.raises(ValueError, match=r"attention = 'cudnn': it cannot .* use 'auto' or 'xla'"):
        kernel_for_tenants("cudnn", platform="gpu")


@pytest.mark.parametrize("policy", ["fp32", "phantom"])
def test_the_shadow_divides_the_mismatch(policy):
    """What the sampler reports is the shadow's before an update: alpha is 0, up to the shapes of
    products. Beta is 0 where both compute in f32."""
    base, names = base_of(policy), ["a", "b"]
    pool = pool_of(base, *names)
    asked = [sampled(base, pool, name, seed) for seed, name in enumerate(names)]

    def metrics():
        computed = zip(asked, pool.compute(asked), strict=True)
        return [answers.metrics(batch, one) for (_, batch), one in computed]

    first = metrics()
    for name in names:
        pool.step(name, CONDITIONED)
    for before, after in zip(first, metrics(), strict=True):
        for found in (before, after):
            whole = found["probe/alpha:mean"] + found["probe/beta:mean"]
            assert whole == pytest.approx(-found["mismatch/kl:mean"], abs=1e-6)
        exact = policy == "fp32"
        assert before["probe/alpha_std:mean"] < (1e-5 if exact else 1e-2)
        assert (before["probe/beta_std:mean"] < 1e-5) == exact
        assert after["probe/alpha_std:mean"] > 2 * before["probe/alpha_std:mean"]


def sampled(base: Base, pool: Pool, name: str, seed: int) -> tuple[str, Batch]:
    """Samples of a tenant's present weights, to be trained on with a shadow."""
    samplers = samplers_of(base)
    samplers.keep("now", served(pool, pool.weights(name)))
    request = Request("now", np.arange(3, 9, dtype=np.int32), 3, 9, 1.0, 1.0, -1, (), seed)
    ((_, answer),) = drawn(samplers, [request])
    data = []
    for one in answer.samples:
        tokens = np.concatenate([request.prompt, one.tokens]).astype(np.int32)
        logprobs = np.zeros((len(tokens) - 1, 1), np.float32)
        logprobs[-len(one.tokens) :, 0] = one.logprobs
        arrays = {"logprobs": logprobs, "advantages": np.float32(logprobs != 0)}
        data.append(Datum(tokens[:-1], tokens[1:, None], arrays, True))
    return name, Batch(data, "importance_sampling", False, shadow=True)
