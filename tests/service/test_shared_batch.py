"""Samples of several tenants in one batch: each is what it would be alone."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.core import Precision, cast
from jaxrl.huggingface import Checkpoint
from jaxrl.models import abstract, decoder, lora
from jaxrl.sampling import Completion, EmbeddedSampler, OwnTurn, SamplingParams, StopTexts, Turn
from jaxrl.sampling.embedded import sampler as sampler_module
from jaxrl.service.backends import Embedded
from jaxrl.service.files import Saved, Stamp
from jaxrl.service.pool import ALPHA, Base, Kind
from jaxrl.service.sampling import BASE, Answer, Request, Samplers
from jaxrl.sharding import PRESETS, Layout, make_mesh
from tests import tiny
from tests.service.drawing import drawn

ONE = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["all"])
# Ranks and adapted matrices differ.
KINDS = {
    "a": (4, ("q_proj", "up_proj")),
    "b": (16, ("*_proj", "lm_head")),
    "c": (1, ("v_proj", "down_proj")),
}
SAVED = {name: Saved(name, Kind(rank), Stamp(())) for name, (rank, _) in KINDS.items()}


class Tenants:
    """A base with adapters of several tenants, and the sampler of the service."""

    def __init__(
        self, config=tiny.CONFIG, *, tokenizer=None, precision: str = "fp32", devices: int = 1
    ) -> None:
        self.policy, self.model = Precision.of(precision), decoder(config)
        self.base = cast(tiny.params(config=config), self.policy.wire)
        self.weights: dict[str, Any] = {BASE: self.base}
        shared = Base(self.model, self.base, self.policy, ONE)
        several = Layout(make_mesh(data=2, devices=jax.devices()[:2]), PRESETS["data"])
        self.embedded = Embedded(shared, max_batch=64, layout=several if devices > 1 else None)
        self.samplers = Samplers(
            shared,
            tokenizer=tokenizer,
            end_ids=(1,),
            load=lambda saved: self.weights[saved.path],
            backend=self.embedded,
        )
        for seed, (name, (rank, targets)) in enumerate(KINDS.items()):
            specs = lora.adapter_specs(self.model.specs, rank=rank, targets=targets)
            rng = np.random.default_rng(seed)

            def noise(x, rng=rng):
                return 0.3 * rng.standard_normal(x.shape).astype(x.dtype)

            adapters = jax.tree.map(noise, abstract(specs, dtype=self.policy.wire))
            adapted = lora.Adapted(adapters, self.base, ALPHA)
            fixed = self.policy.sums == "fixed"
            self.weights[name] = lora.merge(adapted) if fixed else adapted
            self.samplers.keep(name, self.weights[name])

    def together(self, asked: Sequence[Request]) -> list[Answer]:
        """With fixed sums adapters are merged, and each weights have a batch of their own."""
        found = dict[int, Answer]()
        names = [one.weights if self.policy.sums == "fixed" else BASE for one in asked]
        for name in dict.fromkeys(names):
            places = [place for place, other in enumerate(names) if other == name]
            batch = [asked[place]._replace(whole=name) for place in places]
            answers = drawn(self.samplers, batch, SAVED)
            found |= {places[place]: answer for place, answer in answers}
        return [found[place] for place in range(len(asked))]

    def plain(self, one: Request, tokenizer) -> list[Completion]:
        """The samples of the library's sampler, with one set of weights and settings."""
        sampler = EmbeddedSampler(
            self.model, lora.attach(self.weights[one.weights]), precision=self.policy
        )
        texts = bool(one.stop) and isinstance(one.stop[0], str)
        ends = (1,) if one.stop is None else () if texts else one.stop
        params = SamplingParams(
            max_tokens=one.max_tokens,
            temperature=one.temperature,
            top_p=one.top_p,
            top_k=max(one.top_k, 0),
            stop=tuple((end,) for end in ends),
            stop_texts=StopTexts(tokenizer, one.stop) if texts else None,
        )
        turns = [Turn(one.prompt, one.seed, i, one.max_tokens) for i in range(one.count)]
        return sorted(sampler.sample_turns(turns, params), key=lambda c: c.sample_index)


def request(weights: str, seed: int, **changes) -> Request:
    prompt = np.arange(3, 7 + seed % 3, dtype=np.int32)
    one = Request(weights, prompt, 3, 9, 1.0, 1.0, -1, (), seed, prompt_logprobs=True)
    return one._replace(**changes)


REQUESTS = [
    request(BASE, 7),
    request("a", 7),
    request("b", 7, temperature=0.5, top_p=0.8),
    request("c", 8, temperature=0.0, top_k=3),
    request("a", 7, temperature=1.3, top_k=5, stop=(9, 11)),
    request("b", 12, stop=("b", "c")),
    request(BASE, 3, stop=("de",), count=2),
    request("c", 4, stop=None, max_tokens=30),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Checkpoint(tiny.write_checkpoint(tmp_path_factory.mktemp("model"))).tokenizer


def test_a_request_is_answered_as_by_a_sampler_of_its_own(monkeypatch, tokenizer):
    """The tenants' sampler holds weights as on a GPU, each one's own as on a CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(sampler_module, "wants_unstacked", lambda *_: True)
        tenants = Tenants(tokenizer=tokenizer)
    for one, found in zip(REQUESTS, tenants.together(REQUESTS), strict=True):
        expected = tenants.plain(one, tokenizer)
        assert len(found.samples) == one.count
        for mine, alone in zip(found.samples, expected, strict=True):
            np.testing.assert_array_equal(mine.tokens, alone.tokens)
            assert mine.finish_reason == alone.finish_reason
            np.testing.assert_allclose(mine.logprobs, alone.logprobs, atol=1e-5)
    ends = {sample.finish_reason for one in tenants.together(REQUESTS) for sample in one.samples}
    assert ends == {"stop", "length"}


JOINING = (
    [request(BASE, 7, count=2, max_tokens=40)],
    [
        request("a", 7, stop=(9, 11), top_p=0.9, max_tokens=20),
        request("b", 12, stop=("b", "c"), temperature=0.5),
    ],
    [request("c", 8, temperature=0.0, top_k=3), request("b", 4, count=1)],
)


def joined(samplers: Samplers, parts: Sequence[Sequence[Request]]) -> dict[str, Answer]:
    """Answers of requests that join the first ones, a part after every other token."""
    found, begun = dict[str, Answer](), 0
    for number, part in enumerate(parts):
        samplers.add({f"{number}:{i}": one for i, one in enumerate(part)}, SAVED)
        begun += len(part)
        for _ in range(2):
            found |= dict(samplers.advance())
    assert f"0:{len(parts[0]) - 1}" not in found
    while len(found) < begun:
        found |= dict(samplers.advance())
    return found


@pytest.mark.parametrize("devices", [1, 2])
def test_requests_that_join_others_are_answered_as_alone(devices, monkeypatch, tokenizer):
    """The settings' arrays, rows and adapters grow meanwhile; the places of adapters that no
    request needs any more are given to others."""
    monkeypatch.setattr("jaxrl.service.sampling._FEW", 1)
    monkeypatch.setattr("jaxrl.service.sampling._MOST", 1)
    tenants = Tenants(tokenizer=tokenizer, devices=devices)
    found = joined(tenants.samplers, JOINING)
    for number, part in enumerate(JOINING):
        for i, one in enumerate(part):
            expected = tenants.plain(one, tokenizer)
            for mine, alone in zip(found[f"{number}:{i}"].samples, expected, strict=True):
                np.testing.assert_array_equal(mine.tokens, alone.tokens)
                assert mine.finish_reason == alone.finish_reason
                np.testing.assert_allclose(mine.logprobs, alone.logprobs, atol=1e-5)


def assert_alone_as_together(tenants: Tenants, requests: Sequence[Request]) -> None:
    for one, found in zip(requests, tenants.together(requests), strict=True):
        (alone,) = tenants.together([one])
        for mine, expected in zip(found.samples, alone.samples, strict=True):
            np.testing.assert_array_equal(mine.tokens, expected.tokens)
            np.testing.assert_array_equal(mine.logprobs, expected.logprobs)


def test_with_fixed_sums_the_batch_changes_no_bit(monkeypatch, tokenizer):
    tenants = Tenants(tokenizer=tokenizer, precision="fp32,sums=fixed")
    assert_alone_as_together(tenants, REQUESTS)
    monkeypatch.setattr("jaxrl.service.sampling._FEW", 1)
    monkeypatch.setattr("jaxrl.service.sampling._MOST", 1)
    parts = [[one._replace(whole="b", weights="b") for one in part] for part in JOINING]
    found = joined(tenants.samplers, parts)
    for number, part in enumerate(parts):
        for i, one in enumerate(part):
            ((_, alone),) = drawn(tenants.samplers, [one], SAVED)
            for mine, expected in zip(found[f"{number}:{i}"].samples, alone.samples, strict=True):
                np.testing.assert_array_equal(mine.tokens, expected.tokens)
                np.testing.assert_array_equal(mine.logprobs, expected.logprobs)


def test_the_base_is_never_copied(tokenizer):
    tenants = Tenants(tokenizer=tokenizer)
    tenants.together([request("a", 1)])
    served = tenants.embedded.sampler._weights.params
    tenants.together([request("b", 1), request(BASE, 1)])
    assert tenants.embedded.sampler._weights.params is served


def test_adapters_that_change_in_place_are_joined_anew():
    tenants, params = Tenants(), SamplingParams(max_tokens=3)
    turns = [OwnTurn(Turn(np.arange(3, 7, dtype=np.int32), 0, 0, 3), params, 0)]
    several = [lora.scaled(tenants.weights["a"])]

    def logprobs():
        batch = tenants.embedded.sampler.open_own()
        batch.add(turns, several)
        ((_, one),) = [*batch.advance(), *batch.advance()]
        return one.logprobs

    first = logprobs()
    several[0] = jax.tree.map(lambda x: 2 * x, several[0])
    assert not np.allclose(first, second := logprobs())
    layers = several[0]["layers"]
    several[0]["layers"] = {name: 3 * x for name, x in layers.items()}
    assert not np.allclose(second, logprobs())


def test_with_fixed_sums_states_of_linear_layers_change_no_bit(tokenizer, optimized):
    """LLVM's optimisations do not either. The settings of a request meet no state."""
    tenants = Tenants(tiny.QWEN3_5, tokenizer=tokenizer, precision="fp32,sums=fixed")
    assert_alone_as_together(tenants, [REQUESTS[i] for i in (0, 2, 5, 6)])
