"""Bounds on the pass rate; an interruption changes nothing."""

import json

import numpy as np
import pytest

from jaxrl.cli import main
from jaxrl.commands.filter.pass_rate import Journal, Measured
from tests import tiny


def test_bounds_are_inclusive():
    kept = [Measured(k / 40, 0, 0).within(0.2, 0.8) for k in range(41)]
    assert np.flatnonzero(kept).tolist() == list(range(8, 33))
    assert not Measured(None, 40, 0).within(0, 1)


def test_journal_drops_unfinished_lines_and_chunks(tmp_path):
    path = tmp_path / "j"
    measured = [Measured(i / 5, 0, i) for i in range(5)]
    journal = Journal(path, fingerprint={"seed": "a"}, chunk=2, total=5)
    journal.add(measured[:2])
    journal.add(measured[2:4])
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        found = Journal(path, fingerprint={"seed": "a"}, chunk=2, total=5).measured
        lines = whole[:end].count(b"\n") - 1
        assert found == measured[: max(lines, 0) // 2 * 2]
    journal.add(measured[4:])  # the last chunk is shorter
    assert Journal(path, fingerprint={"seed": "a"}, chunk=2, total=5).measured == measured
    with pytest.raises(ValueError, match="measured with another seed; delete it"):
        Journal(path, fingerprint={"seed": "b"}, chunk=2, total=5)


REWARD = """
def early(text, row):
    if row["kind"] == "broken":
        raise ValueError("no")
    return {"never": 0, "always": 1, "some": text < "k"}[row["kind"]]
"""


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    directory = tmp_path_factory.mktemp("filter")
    tiny.write_checkpoint(directory / "model")
    kinds = ["some", "never", "broken", "always"]
    rows = [{"question": f"{i}?", "kind": kind, "n": i} for i, kind in enumerate(kinds)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    keys = {
        "precision": "fp32",
        "model.path": str(directory / "model"),
        "data.path": str(directory / "data.jsonl"),
        "data.prompt_key": "question",
        "data.answer_key": "none",
        "data.max_prompt_tokens": "16",
        "reward.path": f"{directory}/reward.py:early",
        "sampling.max_tokens": "3",
        "train.train_batch": "2",
    }
    given = [f"--{key}={value}" for key, value in keys.items()]
    return ["filter", *given, "--samples", "16", "--low", "0.05", "--high", "0.95"]


def test_kept_rows_gain_only_their_pass_rate(argv, tmp_path, capsys):
    out = tmp_path / "kept.jsonl"
    assert main([*argv, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pass_rates = [row.pop("pass_rate") for row in rows]
    assert rows == [{"question": "0?", "kind": "some", "n": 0}]
    assert 0.05 <= pass_rates[0] <= 0.95
    assert (pass_rates[0] * 16).is_integer()
    printed, progress = capsys.readouterr()
    assert "reward early failed on completion" in progress
    assert "4 prompts (0 more too long), 16 completions each: mean pass rate" in printed
    assert "the reward failed on 16\n" in printed
    assert "kept 1; dropped 1 below 0.05, 1 above 0.95, 1 without a reward\n" in printed

    # Resumed after its first chunk, it finds the same.
    measured = tmp_path / "kept.jsonl.measured"
    whole, kept = measured.read_text(), out.read_text()
    measured.write_text("".join(whole.splitlines(keepends=True)[:4]))
    out.unlink()
    assert main([*argv, "--out", str(out)]) == 0
    assert (measured.read_text(), out.read_text()) == (whole, kept)

    # Other bounds need no new completions.
    assert main([*argv, "--out", str(out), "--low", "0", "--high", "1"]) == 0
    assert len(out.read_text().splitlines()) == 3
    assert measured.read_text() == whole


def test_ctrl_c_keeps_finished_chunks(argv, tmp_path, capsys, monkeypatch):
    from jaxrl.commands.filter import pass_rate

    true = pass_rate.measure

    def interrupted(*args, **kwargs):
        yield next(true(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(pass_rate, "measure", interrupted)
    out = tmp_path / "kept.jsonl"
    assert main([*argv, "--out", str(out)]) == 130
    assert "2 of 4 prompts measured; rerun the same command to resume" in capsys.readouterr().err
    assert not out.exists()
    assert len((tmp_path / "kept.jsonl.measured").read_text().splitlines()) == 3


def test_impossible_bounds_are_rejected(argv, capsys):
    assert main([*argv, "--out", "x", "--low", "0.9", "--high", "0.1"]) == 1
    assert "0 <= low <= high <= 1" in capsys.readouterr().err
