"""A judge reads some completions of a run, which learns nothing from it."""

import asyncio
import contextlib
import json
import runpy
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from jaxrl.tracking.tracker import read_metrics, write_lines
from tests.training import small_runs

SMALL = {"judge.every": 2, "judge.completions": 5, "train.steps": 4}


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    directory = small_runs.write_material(tmp_path_factory.mktemp("material"))
    (directory / "judge.py").write_text(
        "def shorter(completion, example):\n"
        "    if ord(completion[-1:] or 'a') % 2:\n"
        "        raise ValueError('odd')\n"
        "    return -len(completion) + 0 * len(example['answer'])\n"
        "def broken(completion, example):\n"
        "    raise ValueError('never')\n"
    )
    return directory


@pytest.fixture(scope="module")
def without(material) -> Path:
    small_runs.run(material, material / "without", **{"train.steps": 4})
    return material / "without"


def numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    """{step: the judge's metrics, by name}."""
    entries = read_metrics(run_dir / "metrics.jsonl")
    judged = [
        (e["step"], {k[6:]: v for k, v in e.items() if k.startswith("judge/")}) for e in entries
    ]
    return {step: found for step, found in judged if found}


def test_a_function_judges_whole_groups(material, without, tmp_path, capsys):
    small_runs.run(material, tmp_path, **SMALL, **{"judge.path": f"{material}/judge.py:shorter"})
    assert small_runs.state(tmp_path, 4) == small_runs.state(without, 4)
    out = capsys.readouterr().err
    assert 'first row: shorter("0")' in out
    entries = read_metrics(tmp_path / "judge.jsonl")
    found = numbers(tmp_path)
    assert [*found] == [2, 4]
    for step, metrics in found.items():
        sample = [entry for entry in entries if entry["step"] == step]
        assert [*Counter(entry["group"] for entry in sample).values()] == [4, 4]
        wrong = [ord(entry["completion"][-1:] or "a") % 2 == 1 for entry in sample]
        assert 0 < sum(wrong) < 8
        assert [entry["score"] is None for entry in sample] == wrong
        known = [e for e in sample if e["score"] is not None]
        assert all(e["score"] == -len(e["completion"]) for e in known)
        assert metrics["failed"] == sum(wrong)
        assert metrics["step"] == step
        assert metrics["score"] == pytest.approx(sum(e["score"] for e in known) / len(known))
        assert metrics["reward"] == pytest.approx(sum(e["reward"] for e in known) / len(known))
    assert "judge: reward shorter failed" in out


def test_people_judge_while_the_run_goes_on(material, without, tmp_path, capsys):
    scores = tmp_path / "scores.jsonl"
    run_dir = tmp_path / "run"
    keys = SMALL | {"judge.path": scores}
    small_runs.run(material, run_dir, **keys | {"train.steps": 2})
    assert numbers(run_dir) == {}
    waiting = read_metrics(run_dir / "judge.jsonl")
    assert {entry["step"] for entry in waiting} == {2}
    given = [entry | {"score": 2 * entry["reward"]} for entry in waiting]
    given[0]["score"] = None
    write_lines(scores, given[:-1])
    small_runs.run(material, run_dir, **keys | {"train.steps": 3})
    assert numbers(run_dir) == {}  # one is missing
    scores.write_text(f"nonsense\n{scores.read_text()}{json.dumps(given[-1])}\n")
    small_runs.run(material, run_dir, **keys)
    (judged,) = numbers(run_dir).items()
    step, metrics = judged
    assert (step, metrics["step"], metrics["failed"]) == (4, 2, 1)
    assert metrics["score"] == pytest.approx(2 * metrics["reward"])
    assert metrics.get("agreement", 1) == 1
    assert "1 lines cannot be read, line 1: JSONDecodeError" in capsys.readouterr().err
    assert {entry["step"] for entry in read_metrics(run_dir / "judge.jsonl")} == {2, 4}
    assert small_runs.state(run_dir, 4) == small_runs.state(without, 4)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{}/judge.py:longer", "no function 'longer'"),
        ("numeric_mach", "did you mean numeric_match"),
        ("{}/judge.py:broken", "on the first row of the data"),
    ],
)
def test_a_judge_that_cannot_judge_ends_the_run_before_it_begins(material, tmp_path, path, said):
    with pytest.raises(ValueError, match=rf"judge\.path.*{said}"):
        small_runs.run(material, tmp_path / "run", **{"judge.path": path.format(material)})


class Answers(BaseHTTPRequestHandler):
    """A chat route that answers with the length of what it is asked to judge."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["model"]) == ("/v1/chat/completions", "big")
        judged = body["messages"][0]["content"].rpartition("judge: ")[2]
        said = f"I give {len(judged)}." if judged else "?"
        usage = {"prompt_tokens": 1_000_000, "completion_tokens": 10_000}
        answer = {"choices": [{"message": {"content": said}}], "usage": usage}
        content = json.dumps(answer).encode()
        self.send_response(500 if judged == "fail" else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


def test_a_server_judges(monkeypatch, tmp_path):
    path = Path(__file__).parents[2] / "examples/judge.py"
    module = SimpleNamespace(**runpy.run_path(str(path)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    with contextlib.closing(server.socket):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_MODEL", "big")

        def ask(completion: str) -> float:
            return asyncio.run(module.ask(completion, {"prompt": "1+1=", "answer": "2"}))

        assert ask("12345") == 0.5
        assert ask("more than ten letters") == 1.0
        with pytest.raises(ValueError, match="no number"):
            ask("")
        with pytest.raises(httpx2.HTTPStatusError):
            ask("fail")
        assert ask("12345") == 0.5
        free = "judge: 3 questions, and 1 that were asked before; 3,000,000 tokens read, "
        free += "30,000 written"
        assert module.cost() == free
        monkeypatch.setenv("JUDGE_PRICES", "0.15,0.60")
        assert module.cost() == f"{free}; $0.47"  # 3 x 0.15 + 0.03 x 0.60
        (tmp_path / "rubric.txt").write_text("Is {completion} short? judge: {prompt}")
        monkeypatch.setenv("JUDGE_RUBRIC", str(tmp_path / "rubric.txt"))
        assert ask("12345") == 0.4  # the letters of the prompt
        server.shutdown()
