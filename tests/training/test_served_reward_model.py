"""A reward model behind a server; a stand-in speaks the part of vLLM's protocol that it needs."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jaxrl import huggingface
from jaxrl.builders import served_model
from jaxrl.builders.served_model import connect_reward_model, serves_scores
from jaxrl.core.batch import given_rollout
from jaxrl.tracking.tracker import read_metrics
from tests.run_config import run_config
from tests.training import small_runs


class _Classifier(BaseHTTPRequestHandler):
    """Scores token ids by a tenth of their sum; answers in reverse order. Fails in the list."""

    tokenizer: Any
    failing: ClassVar[list[int]] = []
    labels = 1

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m", "max_model_len": 32}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            self._answer({"prompt": self.tokenizer.decode(body["tokens"])})
            return
        assert self.path == "/classify"
        assert body["use_activation"] is False
        if self.failing and len(body["input"]) > 1:
            self._answer({"error": "no memory"}, status=self.failing.pop())
            return
        data = [
            {"index": i, "probs": [sum(ids) / 10] * self.labels, "num_classes": self.labels}
            for i, ids in enumerate(body["input"])
        ]
        self._answer({"data": data[::-1]})

    def _answer(self, content: Any, *, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    return small_runs.write_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def url(material) -> Iterator[str]:
    _Classifier.tokenizer = huggingface.Checkpoint(material / "model").tokenizer
    with ThreadingHTTPServer(("127.0.0.1", 0), _Classifier) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def config(material, url, **changes):
    own = {"reward.path": "", "reward.model": url, "data.max_prompt_tokens": 24}
    return run_config(material, **own | changes)


def test_scores_are_those_of_the_sampled_tokens(material, url, monkeypatch):
    policy: Any = huggingface.Checkpoint(material / "model")
    assert serves_scores(config(material, url))
    score = connect_reward_model(config(material, url), policy)  # 24 + 8 tokens, as many as fit
    found = score([given_rollout([5, 6], [7, 8, 9]), given_rollout([5], [4])])
    assert found.tolist() == [3.5, 0.9]
    with pytest.raises(ValueError, match=r"accepts 32 tokens, but .* needs 33 .*max_tokens\)"):
        connect_reward_model(config(material, url, **{"sampling.max_tokens": 9}), policy)
    monkeypatch.setattr(_Classifier, "labels", 2)
    assert not serves_scores(config(material, url))
    with pytest.raises(ValueError, match="start a teacher with `jaxrl serve` or a reward model"):
        serves_scores(config(material, "http://127.0.0.1:1"))


def test_a_run_learns_from_a_server_that_fails_at_times(
    material, url, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_Classifier, "failing", [500, 503])
    monkeypatch.setattr(served_model, "_WAITS", (0.0, 0.0))
    keys = {"reward.path": f"{material}/reward.py:early_letters", "reward.weights": "0,1"}
    keys |= {"reward.model": url, "sampling.temperature": "0.7", "samples.every": 1}
    small_runs.run(material, tmp_path, **keys, **{"train.steps": 2})
    for entry in (e for e in read_metrics(tmp_path / "metrics.jsonl") if "reward/failed" in e):
        assert entry["reward/failed"] == 0
        assert entry["reward"] == pytest.approx(entry["reward/model"])
    assert not _Classifier.failing
    samples = read_metrics(tmp_path / "samples.jsonl")
    sample = [one for one in samples if not one.get("held_out")][-1]
    ids = _Classifier.tokenizer.encode(
        sample["prompt"] + "".join(sample["tokens"]), add_special_tokens=False
    )
    assert sample["reward"] == pytest.approx(sum(ids) / 10)
    _Classifier.failing += [500, 500, 500]
    with pytest.raises(RuntimeError, match="the rewards of all 12 rollouts failed"):
        small_runs.run(material, tmp_path, **keys, **{"train.steps": 3})
    assert "reward.model: POST" in capsys.readouterr().err
