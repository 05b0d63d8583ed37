"""The sampler over an engine in this process, with an engine that only counts."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl.builders.layout import make_layout
from jaxrl.builders.sampler import SamplerNeeds, open_sampler
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.core.hosts import Hosts
from jaxrl.core.precision import PRESETS
from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.sampling.base import ClosedError, SamplingParams, Turn
from jaxrl.sampling.vllm.in_process import VllmTpuSampler
from jaxrl.sampling.vllm.router import SamplerError
from jaxrl.sampling.vllm.tpu_engine import Ended, prepare_tpu_engine
from tests import tiny
from tests.run_config import run_config

PARAMS = SamplingParams(max_tokens=3, temperature=0.7, top_k=5, stop=((1,), (8, 9)), seed=4)


class Counting:
    """An engine whose completions are 7, 8, 9, ... up to their maximum length."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[int, int]] = {}
        self.asked: list[Mapping[str, Any]] = []
        self.seeds: list[int] = []
        self.aborted: list[str] = []

    def add(self, prompt: np.ndarray, settings: Mapping[str, Any]) -> str:
        self.asked.append(settings)
        self.running[name := str(len(self.asked))] = (0, settings["max_tokens"])
        return name

    def step(self) -> list[Ended]:
        self.running = {name: (n + 1, most) for name, (n, most) in self.running.items()}
        ended = [name for name, (n, most) in self.running.items() if n == most]
        found = []
        for name in ended:
            n, _ = self.running.pop(name)
            tokens = list(range(7, 7 + n))
            found.append(Ended(name, tokens, [-float(t) for t in tokens], "length"))
        return found

    def abort(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            self.running.pop(name, None)

    def use_seed(self, seed: int) -> None:
        self.seeds.append(seed)


def sampler(engine: Counting) -> VllmTpuSampler:
    return VllmTpuSampler(engine, max_positions=16, vocab_size=32)


def turns(*lengths: int) -> list[Turn]:
    return [Turn(np.array([2, 3]), i, 0, length) for i, length in enumerate(lengths)]


def publish(one: VllmTpuSampler, version: int) -> None:
    one.replace(lambda: None, check=lambda: None, version=version)


def test_completions_in_finishing_order() -> None:
    engine = Counting()
    one = sampler(engine)
    publish(one, 5)
    found = list(one.sample_turns(turns(4, 1, 2), PARAMS))
    assert [c.prompt_index for c in found] == [1, 2, 0]
    assert [c.tokens.tolist() for c in found] == [[7], [7, 8], [7, 8, 9]]  # ends with (8, 9)
    assert [c.finish_reason for c in found] == ["length", "length", "stop"]
    assert found[2].logprobs.tolist() == [-7, -8, -9]
    assert found[2].versions.tolist() == [5, 5, 5]
    asked = engine.asked[0]
    assert (asked["temperature"], asked["top_k"], asked["top_p"]) == (0.7, 5, 1.0)
    assert (asked["stop_token_ids"], asked["ignore_eos"], asked["max_tokens"]) == ([1], True, 4)
    assert not {"seed", "min_p"} & asked.keys()  # refused and ignored by the engine
    assert engine.seeds == [4]


def test_min_p_and_bad_prompts_are_refused_at_the_call() -> None:
    one = sampler(Counting())
    with pytest.raises(ValueError, match=r"sampling.min_p = 0.1: vLLM's TPU engine .* ignores it"):
        one.sample_turns(turns(1), SamplingParams(max_tokens=1, min_p=0.1))
    with pytest.raises(ValueError, match="16 positions"):
        one.sample_turns(turns(15), PARAMS)


def test_close_aborts_what_runs() -> None:
    engine = Counting()
    one = sampler(engine)
    running = one.sample_turns(turns(1, 9, 9), PARAMS)
    next(running)
    one.close()
    with pytest.raises(ClosedError):
        next(running)
    assert engine.aborted == ["2", "3"]
    left = sampler(engine).sample_turns(turns(1, 9), PARAMS)
    next(left)
    left.close()
    assert engine.aborted == ["2", "3", "5"]


def test_new_weights_wait_for_the_running_request() -> None:
    one, wrote = sampler(Counting()), threading.Event()
    running = one.sample_turns(turns(1, 2), PARAMS)
    next(running)
    with pytest.raises(SamplerError, match="this thread is still iterating"):
        publish(one, 1)
    other = threading.Thread(target=lambda: one.replace(wrote.set, check=lambda: None, version=1))
    other.start()
    assert not wrote.wait(0.1)
    assert [c.versions.tolist() for c in running] == [[0, 0]]
    other.join(100)
    assert wrote.is_set()
    assert one.version == 1


def test_a_failed_check_changes_nothing_and_a_failed_write_breaks() -> None:
    def fail() -> None:
        raise ValueError("no")

    one = sampler(Counting())
    publish(one, 1)
    with pytest.raises(ValueError, match="no"):
        one.replace(fail, check=fail, version=2)
    assert next(one.sample_turns(turns(1), PARAMS)).versions.tolist() == [1]
    with pytest.raises(ValueError, match="no"):
        one.replace(fail, check=lambda: None, version=2)
    with pytest.raises(SamplerError, match="publishing version 2 failed halfway"):
        next(one.sample_turns(turns(1), PARAMS))
    with pytest.raises(SamplerError, match="publishing version 2 failed halfway"):
        publish(one, 3)


def test_without_vllm_tpu_the_error_says_what_to_install() -> None:
    with pytest.raises(SamplerError, match=r"no vllm-tpu; scripts/install_vllm_tpu.sh"):
        prepare_tpu_engine()


def test_a_run_of_several_processes_is_refused(tmp_path, monkeypatch) -> None:
    config, hosts = run_config(tmp_path, sampler__name="vllm_tpu"), Hosts()
    monkeypatch.setattr(hosts, "count", 2)
    opening = open_sampler(
        config.sampler,
        WeightRoute(tiny.model(), {}, 0, PRESETS["fp32"], Checkpoint("m")),
        layout=make_layout(config.mesh),
        needs=SamplerNeeds(config.longest_sequence, max_batch=1),
        directory=tmp_path,
        note=print,
        hosts=hosts,
    )
    with pytest.raises(ValueError, match=r"single process, and there are 2: .* set sampler\.name"):
        opening.__enter__()
