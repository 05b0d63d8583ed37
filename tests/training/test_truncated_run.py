"""Truncated sampling in a run: the sampler's records reach the step that was compiled for them."""

import json

import pytest

from jaxrl.builders.learner import step_minibatch
from jaxrl.config.training import Config
from jaxrl.train import learn
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import collect
from jaxrl.training.run import open_run
from tests import tiny
from tests.run_config import run_config

REWARD = """
def characters(completion, example):
    return float(sum(map(ord, completion)) % 7)
"""


def config(directory="nothing", **changes) -> Config:
    return run_config(directory, sampling__top_p=0.8, **changes)


def test_a_run_learns_from_the_truncated_distribution(tmp_path):
    tiny.write_checkpoint(tmp_path / "model")
    prompts = [json.dumps({"prompt": letter}) + "\n" for letter in "abcdefgh"]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    (tmp_path / "reward.py").write_text(REWARD)
    keys = {"reward.path": f"{tmp_path}/reward.py:characters", "data.answer_key": "none"}
    with open_run(config(tmp_path, **keys, train__gate="true")) as (run, state, progress):
        assert run.source.params.top_k == 42  # of a vocabulary of 64
        found = collect(run.source, progress=progress, seconds={})
        progress.pending = found.batch
        again = Progress.from_json(json.loads(json.dumps(progress.to_json()))).pending
        assert all(one.kept.shape == (len(one.completion), 32) for one in again)
        learning = run.learning
        described = step_minibatch(
            run.config, learning.recipe, sizes=learning.model.config, shape=learning.shape
        )
        assert described.batch.kept.shape == (*described.batch.tokens.shape, 32)
        _, numbers = learn(run, state, rollouts=found.batch, progress=progress)
    assert abs(numbers["mismatch/kl"]) < 1e-5  # without the records it would be .2
    assert numbers["update/rejected"] in (0, 1)


def test_unavailable_records_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the tokens it keeps, which vLLM's CPU build cannot"):
        config(**{"sampler.name": "vllm"})
    with pytest.raises(ValueError, match=r"which sampler\.name = 'vllm_tpu' does not"):
        config(**{"sampler.name": "vllm_tpu"})
    with pytest.raises(ValueError, match=r"probe\.replay and sampling\.top_p, top_k or min_p"):
        config(**{"sampler.name": "vllm", "sampler.device": "cuda", "probe.replay": "true"})
    with pytest.raises(ValueError, match=r"reference\.server = .*only over the whole vocabulary"):
        config(**{"reference.server": "http://127.0.0.1:1", "loss.kl": "0.1"})
    tiny.write_checkpoint(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    with (
        pytest.raises(ValueError, match=r"\[sampling\] top_k=50: .* at most 42 of 64"),
        open_run(config(tmp_path, sampling__top_k=50)),
    ):
        pass
