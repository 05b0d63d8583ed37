"""`jaxrl eval --keep`: bounds on the pass rate; an interruption changes nothing."""

import json

import numpy as np
import pytest

from jaxrl.cli import main
from jaxrl.commands.eval import pass_rates
from jaxrl.commands.eval.pass_rates import Journal, Measured, is_within, read_bounds
from tests import tiny


def test_bounds_are_inclusive():
    bounds = read_bounds("0.2:0.8")
    # A failure counts as 0.
    prompts = [Measured([1.0] * k + [0.0] * (39 - k) + [None] * (k < 40), 0) for k in range(41)]
    kept = [is_within(one.pass_rate, bounds) for one in prompts]
    assert np.flatnonzero(kept).tolist() == list(range(8, 33))
    assert not is_within(Measured([None] * 40, 0).pass_rate, (0, 1))


def test_journal_drops_unfinished_lines_and_chunks(tmp_path):
    path = tmp_path / "j"
    measured = [Measured([i / 5, None], i) for i in range(5)]
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
    header, first, *_ = whole.splitlines(keepends=True)
    for damaged in (b"garbage\n", b"null\n", b'{"x": 1}\n', b'{"rewards": 3, "truncated": 0}\n'):
        path.write_bytes(header + first + damaged)
        with pytest.raises(ValueError, match=r"j:3: not the outcome of a prompt: .*; delete the"):
            Journal(path, fingerprint={"seed": "a"}, chunk=2, total=5)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="measured with another seed; delete it"):
        Journal(path, fingerprint={"seed": "a"}, chunk=2, total=5)


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
    return ["eval", *given, "--samples", "16", "--keep", "0.05:0.95"]


def test_kept_rows_gain_only_their_pass_rate(argv, tmp_path, capsys):
    out = tmp_path / "kept.jsonl"
    assert main([*argv, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pass_rates = [row.pop("pass_rate") for row in rows]
    assert rows == [{"question": "0?", "kind": "some", "n": 0}]
    assert 0.05 <= pass_rates[0] <= 0.95
    assert (pass_rates[0] * 16).is_integer()
    printed, progress = capsys.readouterr()
    assert "16 of 32 completions could not be scored and count as wrong, first: " in progress
    assert "4 prompts, 0 too long and skipped\npass@1: " in printed
    assert "of 64 completions, " in printed
    assert "the reward failed on 16\n" in printed
    assert "kept 1; dropped 1 below 0.05, 1 above 0.95, 1 without a reward\n" in printed

    # Resumed after its first chunk, it finds the same.
    measured = tmp_path / "kept.jsonl.measured"
    whole, kept = measured.read_text(), out.read_text()
    measured.write_text("".join(whole.splitlines(keepends=True)[:4]))
    out.unlink()
    assert main([*argv, "--out", str(out)]) == 0
    assert (measured.read_text(), out.read_text()) == (whole, kept)

    # Other bounds need no new completions, and other prompts a new measurement.
    assert main([*argv, "--out", str(out), "--keep", "0:1"]) == 0
    assert len(out.read_text().splitlines()) == 3
    assert measured.read_text() == whole
    assert main([*argv, "--out", str(out), "--data.system_prompt", "Add."]) == 1
    assert "was measured with another data.path; delete it" in capsys.readouterr().err


def test_ctrl_c_keeps_finished_chunks(argv, tmp_path, capsys, monkeypatch):
    true = pass_rates.measure

    def interrupted(*args, **kwargs):
        yield next(true(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(pass_rates, "measure", interrupted)
    out = tmp_path / "kept.jsonl"
    assert main([*argv, "--out", str(out)]) == 130
    assert "2 of 4 prompts measured; rerun the same command to resume" in capsys.readouterr().err
    assert not out.exists()
    assert len((tmp_path / "kept.jsonl.measured").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x", "--keep", "0.9:0.1"], "--keep 0.9:0.1: expected LOW:HIGH with LOW <= HIGH"),
        (["--out", "x", "--keep", "0.5"], "--keep 0.5: expected LOW:HIGH"),
        ([], "give both or neither"),
        (["--out", "x", "--completions", "y"], "leave out --completions"),
        (["--out", "x", "--data", "a", "b"], "takes one data set, but --data names 2"),
        (["--out", "x", "--reward.path", ""], "reward.path is missing"),
    ],
)
def test_options_that_do_not_fit_are_rejected(argv, capsys, options, message):
    assert main([*argv, *options]) == 1
    assert message in capsys.readouterr().err
