"""The vLLM client and whole runs against a real server."""

import dataclasses
import signal
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxrl import huggingface, train
from jaxrl.bridge.base import RefusedError
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.launch import LocalServer
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import find_models
from jaxrl.builders.sampler import Serving
from jaxrl.builders.teacher import open_teacher
from jaxrl.core.batch import given_rollout
from jaxrl.core.hosts import Hosts
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import EpisodeLimits, Step
from jaxrl.environments.episodes.runner import ContinuousScheduler, EpisodeRunner
from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sampling.stop_texts import StopTexts
from jaxrl.sampling.vllm import sampler as vllm_sampler
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.sampling.adapter_file import save_adapter
from tests.sampling.serving import (
    FP32,
    MODEL,
    SERVED,
    Material,
    all_logprobs,
    batch_logprobs,
    config,
    opened,
    signal_all,
    started,
    write_material,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build is for Linux")
PROMPTS = [np.array(p, np.int32) for p in ([5, 6, 7], [9], [30, 31, 32, 33, 34, 35], [12, 13])]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    directory = tmp_path_factory.mktemp("vllm")
    write_material(directory)
    with started(directory) as server:
        yield Material(server.url, directory)


@pytest.fixture
def serving(material: Material) -> Iterator[Serving]:
    with opened(material, [material.url], note=print) as made:
        yield made


def sample(sampler, params: SamplingParams, *, group_size: int = 1) -> list:
    found = sampler.sample(PROMPTS, params, group_size=group_size)
    return sorted(found, key=lambda c: (c.prompt_index, c.sample_index))


def test_greedy_completions_equal_the_embedded_samplers(serving):
    embedded = EmbeddedSampler(MODEL, tiny.params(config=SERVED), precision=FP32)
    plain = SamplingParams(max_tokens=24, temperature=0)
    longest = sample(embedded, plain)
    common = longest[0].tokens[3:5].tolist()
    ends = dataclasses.replace(plain, stop=((int(longest[1].tokens[6]),), tuple(common)))
    for params in (plain, ends):
        both = sample(embedded, params), sample(serving.sampler, params)
        for ours, theirs in zip(*both, strict=True):
            assert theirs.tokens.tolist() == ours.tokens.tolist()
            np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=2e-5)
            assert theirs.finish_reason == ours.finish_reason
            assert set(theirs.versions) == {0}
    assert sample(serving.sampler, ends)[1].finish_reason == "stop"


def test_server_ends_at_the_token_that_completes_a_text(serving, material, monkeypatch):
    """A text of several tokens; the client does not cut."""
    embedded = EmbeddedSampler(MODEL, tiny.params(config=SERVED), precision=FP32)
    plain = SamplingParams(max_tokens=24, temperature=0)
    tokenizer = Checkpoint(material.directory / "model").tokenizer
    said = tokenizer.decode(sample(embedded, plain)[0].tokens[4:7], skip_special_tokens=False)
    ends = dataclasses.replace(plain, stop_texts=StopTexts(tokenizer, [said[:-1], "<unk"]))
    expected = sample(embedded, ends)
    monkeypatch.setattr(vllm_sampler, "find_end", lambda *_: None)
    for ours, theirs in zip(expected, sample(serving.sampler, ends), strict=True):
        assert theirs.tokens.tolist() == ours.tokens.tolist()
        assert theirs.finish_reason == ours.finish_reason
        assert len(theirs.versions) == len(theirs.logprobs) == len(ours.tokens)
    assert expected[0].finish_reason == "stop"
    assert len(expected[0].tokens) <= 7


def learner_logprobs(completions, params, *, temperature: float) -> list[np.ndarray]:
    """Scores sampled tokens with the learner."""
    rollouts = [given_rollout(PROMPTS[c.prompt_index], c.tokens) for c in completions]
    scored = batch_logprobs(rollouts, params, temperature=temperature, row_length=32)
    return [
        row[len(r.prompt) : len(r.prompt) + len(r.completion)]
        for row, r in zip(scored, rollouts, strict=True)
    ]


def test_published_server_equals_learner(serving):
    """The canary: tokens sampled at another temperature, scored by the learner's forward pass."""
    drawn = SamplingParams(max_tokens=16, temperature=0.7, seed=5)
    seen = []
    for version, seed in ((1, 1), (2, 2)):
        params = tiny.params(seed, config=SERVED)
        numbers = serving.publish(params, version=version)
        assert numbers.pop("sampler/versions_behind") == 0 < min(numbers.values())
        found = sample(serving.sampler, drawn, group_size=2)
        assert {int(v) for c in found for v in c.versions} == {version} == {serving.sampler.version}
        expected = learner_logprobs(found, params, temperature=0.7)
        for completion, logprobs in zip(found, expected, strict=True):
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=5e-5)
        again = sample(serving.sampler, drawn, group_size=2)
        assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in found]
        seen.append([c.tokens.tolist() for c in found])
    assert seen[0] != seen[1]
    assert len({tuple(tokens) for tokens in seen[0]}) == len(seen[0])


def test_server_and_learner_score_given_tokens_alike(serving):
    """Covers long and short sequences, cached prefixes and new weights."""
    rng = np.random.default_rng(0)
    longest = rng.integers(2, 64, tiny.CONFIG.max_positions).astype(np.int32)
    sequences = [longest[:n] for n in (2, 7, 40, 128)] + [longest[::-1][:90], np.array([9])]
    for version in (1, 2):
        params = tiny.params(version, config=SERVED)
        serving.publish(params, version=version)
        for _ in range(2):  # the second time from the prefix cache
            found = serving.score(sequences)
            logits = all_logprobs(params, longest)
            for sequence, scores in zip(sequences[:4], found[:4], strict=True):
                known = min(len(sequence), 127)
                np.testing.assert_allclose(scores[1:known], logits[1:known], atol=5e-5)
                assert np.isnan(scores[0])
                assert np.isnan(scores[known:]).all()
            assert [len(scores) for scores in found] == [2, 7, 40, 128, 90, 1]
        drawn = sample(serving.sampler, SamplingParams(max_tokens=9, seed=version))
        again = serving.score([np.append(PROMPTS[c.prompt_index], c.tokens) for c in drawn])
        for completion, scores in zip(drawn, again, strict=True):
            np.testing.assert_allclose(completion.logprobs, scores[-9:], atol=5e-5)


@pytest.mark.usefixtures("serving")  # which publishes the checkpoint's weights
def test_served_teacher_equals_local_teacher(material):
    directory, rng = material.directory, np.random.default_rng(1)
    rollouts = [
        given_rollout(rng.integers(2, 64, n), rng.integers(2, 64, 13 - n)) for n in (1, 5, 12)
    ]
    found = []
    for model in (material.url, f"{directory}/model"):
        made = config(directory, reward__model=model)
        layout = make_layout(made.mesh)
        with open_teacher(made, find_models(made), layout=layout, hosts=Hosts()) as teacher:
            found.append(np.concatenate(teacher(rollouts)))
    np.testing.assert_allclose(*found, atol=5e-5)


@pytest.mark.usefixtures("serving")
def test_served_reference_is_the_initial_model(material, tmp_path):
    """The embedded sampler samples, so the server keeps the weights that it started with."""
    found = []
    for name, keys in {"own": {}, "served": {"reference__server": material.url}}.items():
        run = {"run_dir": f"{tmp_path}/{name}", "sampler__name": "embedded", "loss__kl": "0.1"}
        train.train(config(material.directory, train__steps="3", **run, **keys))
        rows = [e for e in read_metrics(tmp_path / name / "metrics.jsonl") if "reward" in e]
        found.append([[row[n] for n in ("kl/reference", "loss", "grad_norm")] for row in rows])
    np.testing.assert_allclose(*found, rtol=1e-3, atol=2e-6)
    assert found[0][-1][0] > 100 * abs(found[1][0][0])  # it has moved from a reference that has not


class Speaks:
    """Replies with the same tokens after each of three turns."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, example):
        return example.tokens

    def step(self, completion):
        self.turns += 1
        return Step([40, 3], done=self.turns == 3)


def test_turn_is_conditioned_on_the_episode(serving):
    """Each token has the log-prob that one forward pass over the whole episode gives."""
    limits = EpisodeLimits(
        max_turns=3, max_tokens=60, max_prompt_tokens=16, timeout=600.0, vocab_size=64
    )
    params = SamplingParams(max_tokens=60, stop=tuple((i,) for i in range(32)), seed=5)
    examples = {7 + i: Example(prompt, {}, {}) for i, prompt in enumerate(PROMPTS)}
    serving.publish(tiny.params(3, config=SERVED), version=3)
    found = EpisodeRunner(Speaks, limits, ContinuousScheduler).run(
        examples, sampler=serving.sampler, params=params, group_size=4
    )
    assert found.first_failure is None
    assert {r.episode.end for r in found.rollouts} == {"done"}
    scores = serving.score([np.append(r.prompt, r.completion) for r in found.rollouts])
    for r, known in zip(found.rollouts, scores, strict=True):
        assert (r.completion[~r.action_mask] == [40, 3] * 2).all()
        assert set(r.version[r.action_mask]) == {3}
        whole = known[len(r.prompt) :][r.action_mask]
        np.testing.assert_allclose(r.logprobs[r.action_mask], whole, atol=5e-5)


def test_logprobs_are_those_of_the_truncated_distribution(serving):
    truncated = SamplingParams(max_tokens=8, top_k=3, seed=1)
    found = sample(serving.sampler, truncated, group_size=4)
    expected = learner_logprobs(found, tiny.params(config=SERVED), temperature=1.0)
    for completion, whole in zip(found, expected, strict=True):
        assert (completion.logprobs > whole - 1e-5).all()
        assert completion.logprobs.min() > np.log(1e-6)
    (only,) = {
        float(c.logprobs.max())
        for c in sample(serving.sampler, dataclasses.replace(truncated, top_k=1))
    }
    assert only == 0.0


def test_many_long_prompts_with_seeds(serving):
    """Stock vLLM on a CPU crashes here, because it prefills some prompts in chunks."""
    prompts = [np.full(100, 2 + i, np.int32) for i in range(40)]
    found = serving.sampler.sample(prompts, SamplingParams(max_tokens=4, seed=1), group_size=2)
    assert len(list(found)) == 80


def test_too_long_prompt_is_an_error(serving):
    with pytest.raises(ValueError, match="positions"):
        serving.sampler.sample([np.arange(2, 60)] * 2, SamplingParams(max_tokens=100), group_size=1)


def test_run_trains_through_a_server(material, tmp_path):
    changes = {
        "sampler__url": material.url,
        "run_dir": str(tmp_path / "run"),
        "probe__every": "1",
        "probe__replay": "true",
    }
    first = train.train(config(material.directory, **changes))
    assert first.model is not None
    rows = [e for e in read_metrics(tmp_path / "run/metrics.jsonl") if "reward" in e]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert abs(row["kl"]) < 1e-6  # learner and sampler agree
        assert row["time/publish/load"] > 0
        whole = row["probe/dtype"] + row["probe/engine"] + row["probe/policy"]
        assert whole == pytest.approx(row["probe/alpha"] + row["probe/beta"], abs=1e-9)
        assert row["probe/engine_p99"] < 1e-4  # f32 on both sides
    again = train.train(config(material.directory, **changes, train__steps="3"))
    assert again.step == 3
    _, params = huggingface.load(again.model, dtype=None)
    before = tiny.params(config=SERVED)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, before)
    assert all(jax.tree.leaves(changed))


@pytest.mark.usefixtures("sampled_ahead")
def test_a_run_trains_while_the_server_samples(material, tmp_path):
    changes = {
        "sampler__url": material.url,
        "run_dir": str(tmp_path / "run"),
        "rollouts__max_staleness": "2",
        "train__steps": "5",
    }
    assert train.train(config(material.directory, **changes)).step == 5
    rows = [e for e in read_metrics(tmp_path / "run/metrics.jsonl") if "reward" in e]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        kinds = ("trained", "stale", "zero_variance", "waiting")
        assert row["rollouts/sampled"] == sum(row[f"rollouts/{kind}"] for kind in kinds)
        assert row["staleness/max"] <= 2
    assert max(row["staleness"] for row in rows) > 0


@pytest.fixture(scope="module")
def second(material: Material) -> Iterator[LocalServer]:
    """A server that also takes adapters. The file's last test kills it."""
    with started(material.directory, rank=4) as server:
        yield server


def test_adapters_are_published_alone(material, second, tmp_path):
    """Trains adapters through the server, then compares them with the merged model."""
    keys = {"lora__rank": "4", "lora__publish": "adapters"}
    run = {"run_dir": str(tmp_path / "run"), "probe__every": "1", "probe__replay": "true"}
    done = train.train(config(material.directory, sampler__url=second.url, **keys, **run))
    assert done.model is not None
    for row in read_metrics(tmp_path / "run/metrics.jsonl"):
        if "reward" in row:
            assert abs(row["kl"]) < 1e-6  # learner and sampler agree
            assert row["probe/engine_p99"] < 1e-4
    plain = SamplingParams(max_tokens=24, temperature=0)
    _, merged = huggingface.load(done.model, dtype=FP32.params)
    with opened(material, [second.url], note=print) as whole:
        base = sample(whole.sampler, plain)
        whole.publish(merged, version=5)
        expected = sample(whole.sampler, plain)
    assert [c.tokens.tolist() for c in base] != [c.tokens.tolist() for c in expected]
    trained = keys | {"lora__path": str(tmp_path / "run/adapter")}
    with opened(material, [second.url], note=print, **trained) as alone:

        def check() -> None:
            found = sample(alone.sampler, plain)
            assert [c.tokens.tolist() for c in found] == [c.tokens.tolist() for c in expected]
            assert {int(v) for c in found for v in c.versions} == {0}
            scored = alone.score([np.append(PROMPTS[c.prompt_index], c.tokens) for c in found])
            for ours, theirs, scores in zip(found, expected, scored, strict=True):
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=5e-5)
                np.testing.assert_allclose(ours.logprobs, scores[-24:], atol=5e-5)

        check()
        (server,) = alone.publish._servers
        with pytest.raises(RefusedError, match="greater than max_lora_rank"):
            server.load_adapter("larger", save_adapter(tmp_path / "larger", rank=16))
        check()  # a refused adapter leaves the old one in place
        larger = opened(material, [second.url], note=print, **keys | {"lora__rank": "16"})
        with pytest.raises(RefusedError, match="greater than max_lora_rank"), larger:
            pass
        with pytest.raises(RuntimeError, match="of another learner"):
            check()  # that process has replaced the base weights


def test_a_failed_server_is_skipped_and_recovers(material, second, monkeypatch):
    """It is killed during requests, hangs, and is killed during a publish. The other server takes
    over its requests, and each completion comes once."""
    notes: list[str] = []
    plain, drawn = (SamplingParams(max_tokens=32, temperature=t) for t in (0.0, 1.0))
    mortal, port = second.url, int(second.url.rpartition(":")[2])
    failed = f"{mortal} is behind by 1 version; continuing with the other servers"

    def publish(version: int) -> float:
        params = tiny.params(version, config=SERVED)
        return serving.publish(params, version=version)["sampler/servers"]

    def versions() -> set[int]:
        found = sample(serving.sampler, drawn, group_size=8)
        assert len(found) == 8 * len(PROMPTS)
        return {int(v) for c in found for v in c.versions}

    with opened(
        material, [material.url, mortal], note=notes.append, sampler__timeout="10"
    ) as serving:
        requests = serving.sampler.sample(PROMPTS * 24, plain, group_size=1)
        found = [next(requests)]
        signal_all(second, signal.SIGKILL)
        found += requests
        assert len({(c.prompt_index, c.sample_index) for c in found}) == len(found) == 96
        expected = [c.tokens.tolist() for c in sample(serving.sampler, plain)]
        assert all(c.tokens.tolist() == expected[c.prompt_index % 4] for c in found)
        assert publish(1) == 1
        assert failed in notes[-1]
        assert versions() == {1}
        with started(material.directory, port=port) as third:
            assert publish(2) == 2
            assert notes[-1] == f"{mortal} is back and serves version 2; it missed 1 version"
            assert versions() == {2}

            signal_all(third, signal.SIGSTOP)
            assert versions() == {2}
            assert publish(3) == 1
            assert versions() == {3}
            signal_all(third, signal.SIGCONT)
            assert publish(4) == 2
            assert notes[-1] == f"{mortal} is back and serves version 4; it missed 1 version"
            assert versions() == {4}

            load = VllmServer._load

            def killed_meanwhile(server: VllmServer, info: dict):
                if server.url == mortal:
                    signal_all(third, signal.SIGKILL)
                return load(server, info)

            monkeypatch.setattr(VllmServer, "_load", killed_meanwhile)
            assert publish(5) == 1
            assert failed in notes[-1]
            assert versions() == {5}
    # A run that starts while a server is down starts with the others.
    with opened(material, [mortal, material.url], note=notes.append) as serving:
        assert failed in notes[-1]
        assert versions() == {0}
