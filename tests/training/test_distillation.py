"""Teachers: a language model, or a server of one, that scores the tokens of completions."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl import huggingface, train
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import ModelFiles, find_models
from jaxrl.builders.reward_model import load_reward_model
from jaxrl.builders.teacher import check_teacher, open_teacher, score_completions
from jaxrl.config.training import Config
from jaxrl.core.batch import from_json, given_rollout, to_json
from jaxrl.core.hosts import Hosts
from jaxrl.core.packing import MinibatchShape
from jaxrl.core.precision import PRESETS
from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import LIMITS
from jaxrl.diagnostics.alarms.rules import zero_variance
from jaxrl.learner.policy import make_score
from jaxrl.models.model import decoder
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.run_config import run_config
from tests.training.json_server import JsonHandler, sampled, serving

FP32 = PRESETS["fp32"]
# Another architecture than the policy's, with its vocabulary.
CONFIG = dataclasses.replace(tiny.CONFIG, model_type="llama", qk_norm=None, num_layers=1)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    directory = tmp_path_factory.mktemp("material")
    tiny.write_checkpoint(directory / "policy")
    params = tiny.params(1, config=CONFIG)
    source = huggingface.Checkpoint(directory / "policy")
    huggingface.save(directory / "teacher", params, CONFIG, dtype=FP32.wire, source=source)
    rows = [{"prompt": p, "answer": p} for p in ("ab", "cd", "ef", "gh")]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return directory


def config(material, **changes) -> Config:
    own = {
        "model.path": material / "policy",
        "reward.path": "",
        "reward.model": material / "teacher",
        "train.steps": 6,
        "train.group_size": 8,
        "train.microbatch_tokens": 256,
    }
    return run_config(material, **own | changes)


def test_scores_are_independent_of_the_batch():
    """Five completions in minibatches of two; the experts of the policy are not replayed."""
    score = make_score(decoder(CONFIG), precision=FP32)
    compiled = functools.partial(jax.jit(score), tiny.params(1, config=CONFIG))
    shape = MinibatchShape(row_length=24, rows_per_microbatch=2, sharding=jax.devices()[0])
    rollouts = [r._replace(experts=np.zeros((r.length, 2, 2), np.int16)) for r in tiny.rollouts(5)]
    few = dataclasses.replace(shape, max_rows=2)
    together = score_completions(rollouts, score=compiled, shape=few)
    for rollout, found in zip(rollouts, together, strict=True):
        (alone,) = score_completions([rollout], score=compiled, shape=few)
        np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)
        assert (found[rollout.action_mask] < 0).all()
        assert not found[~rollout.action_mask].any()


def test_with_fixed_sums_scores_have_the_bits_of_a_sequence_alone(material):
    """Those of a teacher and of a reward model."""
    scored = dataclasses.replace(CONFIG, scored=True)
    params, source = tiny.params(2, config=scored), huggingface.Checkpoint(material / "policy")
    params |= {"score": jax.random.normal(jax.random.key(0), params["score"].shape)}
    huggingface.save(material / "scorer", params, scored, dtype=FP32.wire, source=source)
    rollouts = tiny.rollouts(64, longest=64)
    rows = {"train.row_length": "256", "train.microbatch_tokens": "1024"}
    for name in ("teacher", "scorer"):
        model = {"reward.model": material / name, "precision": "fp32,sums=fixed"}
        made = config(material, **rows, **model)
        given = {"layout": make_layout(made.mesh, precision=made.precision)}
        if name == "scorer":
            score = load_reward_model(made, find_models(made), **given)
            whole, alone = score(rollouts), [score([one]) for one in rollouts]
        else:
            with open_teacher(made, find_models(made), hosts=Hosts(), **given) as score:
                assert score is not None
                whole, alone = np.concatenate(score(rollouts)), [score([r])[0] for r in rollouts]
        np.testing.assert_array_equal(whole, np.concatenate(alone))


def test_the_policy_approaches_its_teacher(material):
    train.train(config(material))
    rows = read_metrics(material / "run" / "metrics.jsonl")
    distances = [row["kl/teacher"] for row in rows]
    assert np.mean(distances[-2:]) < 0.9 * np.mean(distances[:2])
    assert [row["reward"] for row in rows] == [0.0] * len(rows)  # a teacher rewards nothing


def test_a_run_reads_each_config_once(material, tmp_path, monkeypatch):
    """Of the policy, and of a model that is both teacher and critic; until the model is written."""
    read, read_text = Counter[Path](), Path.read_text

    def counted(path: Path, **options: Any) -> str:
        read[path] += path.name == "config.json"
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    critic = {"loss.name": "ppo", "critic.path": f"{material}/teacher"}
    train.train(config(material, **critic, **{"train.steps": "1", "run_dir": str(tmp_path)}))
    assert +read == {material / name / "config.json": 1 for name in ("policy", "teacher")}


def test_a_teachers_scores_survive_a_checkpoint():
    rollout = tiny.rollouts(1)[0]
    rollout = rollout._replace(teacher=np.linspace(-2, 0, len(rollout.completion), dtype="f4"))
    found = from_json(json.loads(json.dumps(to_json(rollout)))).teacher
    np.testing.assert_array_equal(found, rollout.teacher)


class _Teacher(JsonHandler):
    """Speaks the part of vLLM's protocol that a teacher needs; gives token t the log-prob -t."""

    gap = 0.3  # between logits, in nats

    def get(self) -> None:
        self.answer({"data": [{"id": "m", "max_model_len": 17}]})

    def post(self, body: Any) -> None:
        if self.path == "/detokenize":
            self.answer({"prompt": " ".join(map(str, body["tokens"]))})
            return
        if self.path == "/v1/completions":
            self.answer(sampled(body, gap=self.gap))
            return
        if self.path != "/inference/v1/generate":
            self.answer({"detail": "Not Found"}, status=404)
            return
        scores = [{str(t): {"logprob": -float(t)}} for t in body["token_ids"]]
        choice = {"weight_versions": [{"version": "default", "start": 0, "end": 1}]}
        self.answer({"choices": [choice], "prompt_logprobs": [None, *scores[1:]]})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(_Teacher) as address:
        yield address


def opened(config, decode):
    vocabulary = {str(i): i for i in range(64)}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, decode=decode)
    policy: Any = SimpleNamespace(tokenizer=tokenizer, config=tiny.CONFIG)
    layout: Any = None
    return open_teacher(config, ModelFiles(policy, None, policy), layout=layout, hosts=Hosts())


def test_served_teacher_scores_sampled_tokens(material, url):
    def decode(ids, **_):
        return " ".join(map(str, ids))

    def repeated(ids, **_):
        return decode([*ids, *ids])

    rollouts = [given_rollout([5, 6], [7, 8, 9]), given_rollout([5], [4])]
    with opened(config(material, **{"reward.model": url}), decode) as teacher:
        found = [scores.tolist() for scores in teacher(rollouts)]
    assert found == [[-7.0, -8.0, -9.0], [-4.0]]
    too_long = config(material, **{"reward.model": url, "sampling.max_tokens": "9"})
    with pytest.raises(ValueError, match=r"accepts 17 tokens, but scoring .* needs 18"):
        opened(too_long, decode).__enter__()
    with pytest.raises(ValueError, match="its tokenizer is not the policy's: it decodes"):
        opened(config(material, **{"reward.model": url}), repeated).__enter__()
    warm = config(material, **{"reward.model": url, "sampling.temperature": "0.5"})
    with pytest.raises(ValueError, match="vLLM scores given tokens only at a temperature of 1"):
        opened(warm, decode).__enter__()


def test_a_teacher_that_rounds_its_logits_is_refused(material, url, monkeypatch):
    """Differences of logits that are rounded to 16 bits are multiples of a power of two."""

    def decode(ids, **_):
        return " ".join(map(str, ids))

    monkeypatch.setattr(_Teacher, "gap", 0.25 + 2**-11)
    with pytest.raises(ValueError, match=r"reward\.model = .* rounds its logits .*head_dtype"):
        opened(config(material, **{"reward.model": url}), decode).__enter__()
    both = config(material, **{"reward.model": url, "precision": "bf16_master,logits=bf16"})
    with opened(both, decode):
        pass


def test_equal_rewards_are_fine_with_teacher():
    equal, taught = History(), History()
    for step in range(1, 21):
        numbers = {"step": step, "groups/zero_std": 8.0, "groups/sampled": 8.0, "reward": 0.0}
        equal.add(numbers)
        taught.add(numbers | {"kl/teacher": 0.1})
    assert zero_variance.find(equal, LIMITS) is not None
    assert zero_variance.find(taught, LIMITS) is None


@pytest.mark.parametrize("rewards", [{}, {"reward.path": "brevity", "reward.weights": "0,1"}])
def test_dynamic_sampling_needs_a_reward_beside_the_teacher(material, rewards):
    rounds = {"train.dynamic_sampling_rounds": 2}
    with pytest.raises(ValueError, match=r"dynamic_sampling_rounds = 2 .* is a teacher, and no"):
        check_teacher(config(material, **rounds, **rewards))
    check_teacher(config(material, **rounds, **{"reward.path": "brevity"}))
