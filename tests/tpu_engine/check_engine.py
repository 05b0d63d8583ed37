"""jaxrl and vLLM's TPU engine in one process, on simulated devices: see test_tpu_engine.sh.

The references are transformers' float64 log-probs of a checkpoint of the published weights.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from jax._src.array import ArrayImpl

from jaxrl import train
from jaxrl.bridge import PoisonedError, RefusedError
from jaxrl.bridge.tpu_engine import rules
from jaxrl.huggingface import Checkpoint
from jaxrl.models.families import FAMILIES
from jaxrl.sampling import (
    ClosedError,
    Completion,
    SamplerError,
    SamplingParams,
    StopTexts,
    TpuEngine,
    Turn,
    VllmTpuSampler,
)
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.run_config import run_config
from tests.tpu_engine.served import (
    GREEDY,
    LLAMA,
    PROMPTS,
    QWEN2,
    QWEN3,
    Served,
    aligned,
    far,
    reference,
    serve,
)

BOUND = 1e-5  # nats, in f32


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Served:
    """Two shards in the engine, in another order than the learner's two."""
    directory = tmp_path_factory.mktemp("engine") / "model"
    return serve(directory, QWEN3, learner=[0, 1], devices=[1, 0])


def equal(a: list[Completion], b: list[Completion]) -> bool:
    same = [
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs)
        for x, y in zip(a, b, strict=True)
    ]
    return all(same)


def check_exact(served: Served, params) -> None:
    found = served.sample()
    logprobs = reference(served, params, found)
    assert far(found, logprobs) < BOUND
    for one, of in zip(found, logprobs, strict=True):
        assert (of.max(-1) - np.take_along_axis(of, one.tokens[:, None], -1)[:, 0] < BOUND).all()


def test_twenty_publishes_are_exact(served: Served) -> None:
    first = served.params(0)
    served.publish(first, version=3)
    at_first = served.sample()
    assert served.sampler.version == 3
    assert all((one.versions == 3).all() for one in at_first)
    for seed in range(20):
        params = served.params(seed)
        served.publish(params, version=seed)
        check_exact(served, params)
    served.publish(first)
    assert equal(served.sample(), at_first)
    check_exact(served, first)  # now from the prefix cache


@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(QWEN3, tied=False), QWEN2, LLAMA, dataclasses.replace(LLAMA, tied=False)],
    ids=["qwen3 untied", "qwen2", "llama tied", "llama"],
)
def test_families_are_exact(tmp_path: Path, config) -> None:
    one = serve(tmp_path / "model", config, learner=[0], devices=[0])
    for seed in range(2):
        params = one.params(seed)
        one.publish(params)
        check_exact(one, params)


def test_bf16_on_devices_of_its_own(tmp_path: Path, monkeypatch) -> None:
    one = serve(tmp_path / "model", QWEN3, learner=[0, 1], devices=[2, 3], precision="bf16_master")
    params = one.params(0)

    whole = ArrayImpl._value.fget

    def small(array: Any) -> Any:
        assert array.size <= 2, "a weight passed through the host"
        return whole(array)

    with monkeypatch.context() as patch:
        patch.setattr(ArrayImpl, "_value", property(small))
        one.publish(params)
    found = one.sample()
    served_weights = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    logprobs = reference(one, served_weights, found)
    differences = np.concatenate(
        [
            one.logprobs - np.take_along_axis(of, one.tokens[:, None], -1)[:, 0]
            for one, of in zip(found, logprobs, strict=True)
        ]
    )
    assert 0 < np.abs(differences).mean() < 0.1


def test_logprobs_are_those_of_the_distribution_drawn_from(served: Served) -> None:
    params = served.params(1)
    served.publish(params)
    found = served.sample(SamplingParams(max_tokens=8, temperature=0.7, seed=5), group_size=2)
    hot = [of / 0.7 for of in reference(served, params, found)]
    assert far(found, [of - np.logaddexp.reduce(of, -1, keepdims=True) for of in hot]) < BOUND

    found = served.sample(SamplingParams(max_tokens=8, top_k=3, seed=5), group_size=2)
    kept = [
        np.where(of >= np.sort(of)[:, -3:][:, :1], of, -np.inf)
        for of in reference(served, params, found)
    ]
    assert far(found, [of - np.logaddexp.reduce(of, -1, keepdims=True) for of in kept]) < BOUND


def test_a_seed_repeats_a_request(served: Served) -> None:
    def draw(seed: int) -> list[list[int]]:
        found = served.sample(SamplingParams(max_tokens=8, seed=seed), group_size=2)
        return [one.tokens.tolist() for one in found]

    first = draw(2**40 + 7)
    assert draw(2**40 + 7) == first
    assert draw(7) != first
    assert first[0] != first[1]


def test_completions_come_as_they_end(served: Served) -> None:
    turns = [Turn(PROMPTS[0], i, 0, n) for i, n in enumerate((6, 2, 4))]
    found = list(served.sampler.sample_turns(turns, GREEDY))
    assert [(one.prompt_index, len(one.tokens)) for one in found] == [(1, 2), (2, 4), (0, 6)]
    assert {one.finish_reason for one in found} == {"length"}


def test_stops(served: Served) -> None:
    (plain,) = served.sample(prompts=PROMPTS[:1])
    token = int(plain.tokens[2])
    before = plain.tokens.tolist().index(token)
    (one,) = served.sample(
        SamplingParams(max_tokens=6, temperature=0.0, stop=((token,),)), prompts=PROMPTS[:1]
    )
    assert one.tokens.tolist() == plain.tokens[: before + 1].tolist()
    assert one.finish_reason == "stop"
    tokenizer = Checkpoint(served.directory).tokenizer
    text = tokenizer.decode(plain.tokens[1:3], skip_special_tokens=False)
    texts = StopTexts(tokenizer, [text])
    (one,) = served.sample(
        SamplingParams(max_tokens=6, temperature=0.0, stop_texts=texts), prompts=PROMPTS[:1]
    )
    assert one.tokens.tolist() == plain.tokens[: texts.end(plain.tokens)].tolist()
    assert one.finish_reason == "stop"


def test_close_and_leaving_an_iteration_abort(served: Served) -> None:
    sampler = VllmTpuSampler(served.engine, max_positions=64, vocab_size=64)
    turns = [Turn(PROMPTS[0], 0, 0, 1), Turn(PROMPTS[0], 1, 0, 40)]
    left = sampler.sample_turns(turns, GREEDY)
    next(left)
    with pytest.raises(SamplerError, match="still iterating"):
        sampler.replace(lambda: None, check=lambda: None, version=1)
    left.close()
    assert served.engine.reset_prefix_cache()  # nothing runs

    running = sampler.sample_turns(turns, GREEDY)
    next(running)
    sampler.close()
    with pytest.raises(ClosedError):
        next(running)
    assert served.engine.reset_prefix_cache()


def test_a_running_request_refuses_a_publish(served: Served) -> None:
    params = served.params(0)
    served.publish(params)
    name = served.engine.add(PROMPTS[0], {"max_tokens": 20, "temperature": 0.0})
    served.engine.step()
    with pytest.raises(RefusedError, match="still has requests"):
        served.publish(served.params(1))
    served.engine.abort([name])
    check_exact(served, params)  # the old weights, unharmed


def test_without_forgetting_prefixes_log_probs_are_wrong(served: Served, monkeypatch) -> None:
    served.publish(served.params(0))
    served.sample()
    params = served.params(1)
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "reset_prefix_cache", lambda: True)
        served.publish(params)
    found = served.sample()
    assert far(found, reference(served, params, found)) > 0.01
    served.publish(params)
    check_exact(served, params)


def test_the_engine_frees_its_cache_for_a_publish(served: Served, monkeypatch) -> None:
    held = []
    monkeypatch.setattr(
        served.engine, "refresh", lambda: held.append(len(served.engine._runner.kv_caches))
    )
    with pytest.raises(Exception):  # noqa: B017, PT011
        served.publish(served.params(0))
    assert held == [0]


def test_other_families_are_refused_for_the_reason_that_holds() -> None:
    from tpu_inference.models.common import model_loader

    in_jax = set()
    for name, family in FAMILIES.items():
        with contextlib.suppress(model_loader.UnsupportedArchitectureError):
            config = transformers.PretrainedConfig(architectures=[family.architecture])
            model_loader._get_model_architecture(config)
            in_jax.add(name)
    assert in_jax == {*rules.FAMILIES, *rules.NOT_SERVED}


def test_a_simulated_device_does_not_see_a_refilled_buffer(served: Served) -> None:
    from tpu_inference.utils import device_array

    buffer = aligned(np.zeros(64, np.int32))
    (array,) = device_array(served.engine._runner.mesh, (buffer,))
    buffer[:] = 1
    assert not np.asarray(array).any()


def test_a_two_step_run(tmp_path: Path, monkeypatch) -> None:
    build = TpuEngine.__init__

    def build_aligned(self: TpuEngine, *arguments: Any, **keywords: Any) -> None:
        build(self, *arguments, **keywords)
        for holder, name in (
            (self._runner, "positions_cpu"),
            (self._runner.device_buffer, "buffer"),
        ):
            setattr(holder, name, aligned(getattr(holder, name)))

    monkeypatch.setattr(TpuEngine, "__init__", build_aligned)
    tiny.write_checkpoint(tmp_path / "model", config=QWEN3)
    lines = [json.dumps({"prompt": p, "answer": p}) for p in ("abcd", "efgh", "ijkl", "mnop")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    changes = {"sampler.name": "vllm_tpu", "mesh.fsdp": 4, "probe.every": 1, "seed": 3}
    config = run_config(tmp_path, **changes, **{"data.max_prompt_tokens": 16})
    result = train.train(config)
    assert result.step == 2
    metrics = read_metrics(Path(config.run_dir, "metrics.jsonl"))
    assert len(metrics) == 2
    for row in metrics:
        assert row["probe/alpha_std"] < BOUND  # the learner's log-probs minus the engine's


def test_without_refresh_a_publish_is_found_out(tmp_path: Path, monkeypatch) -> None:
    one = serve(tmp_path / "model", QWEN3, learner=[0], devices=[0])
    monkeypatch.setattr(one.engine, "refresh", lambda: None)
    with pytest.raises((PoisonedError, RuntimeError), match="deleted"):
        one.publish(one.params(0))
    with pytest.raises(SamplerError, match="failed halfway"):
        one.sample()
