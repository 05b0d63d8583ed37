"""Statistics of repeated completions against enumeration, and `jaxrl eval` on two data sets."""

import itertools
import json
import math

import numpy as np
import pytest

from jaxrl.cli import main
from jaxrl.commands.eval import scores
from jaxrl.commands.eval.scores import summarize
from jaxrl.data.prompts import Example
from jaxrl.diagnostics.accuracy import half_interval, majority, pass_at_k
from tests import arithmetic

REWARDS = np.random.default_rng(0).integers(0, 2, (7, 6)).astype(float)


@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_averages_all_subsets(k):
    chosen = [
        np.max(REWARDS[:, list(some)], axis=1) for some in itertools.combinations(range(6), k)
    ]
    assert pass_at_k(REWARDS, k) == pytest.approx(np.mean(chosen))


@pytest.mark.parametrize("wrong", [REWARDS == 0, REWARDS[:, ::-1] * REWARDS == 0])
def test_failed_completions_count_as_wrong(wrong):
    failing, zero = np.where(wrong, math.nan, REWARDS), np.where(wrong, 0, REWARDS)
    examples = [Example(np.zeros(1, np.int32), {}, {"level": i % 3}) for i in range(len(REWARDS))]
    found, expected = (summarize(r, examples, by="level") for r in (failing, zero))
    assert (found.pop("failed"), expected.pop("failed")) == (wrong.sum(), 0)
    line = list(scores.lines(found | {"failed": int(wrong.sum())}))[-1]
    assert line.endswith(f" ({wrong.sum()} of 42 could not be scored)")
    failed = [part.pop("failed") for part in found["by"].values()]
    assert failed == [wrong[i::3].sum() for i in range(3)]
    assert [part.pop("failed") for part in expected["by"].values()] == [0] * 3
    assert found == expected


def test_majority_shares_a_prompt_among_equals():
    rewards = np.array([[1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    answers = [[4, 5, 4, 6], [7, 8, 7, 7], [1, 1, 2, 2], [None] * 4]
    assert majority(answers, rewards) == pytest.approx((1 + 0 + 0.5 + 0) / 4)


def test_interval_has_its_coverage():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        rewards = rng.binomial(1, rng.beta(2, 2, (100, 1)), (100, 4)).astype(float)
        covered += abs(rewards.mean() - 0.5) <= half_interval(rewards)
    assert covered == pytest.approx(950, abs=25)


def test_samples_by_column_of_two_data_sets(tmp_path, capsys):
    arithmetic.write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    rows = [row | {"level": "even" if i % 2 else "odd"} for i, row in enumerate(rows)]
    for name, part in (("a", rows[:4]), ("b", rows[4:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)
    paths = [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    argv = ["eval", "--model.path", f"{tmp_path}/untrained", "--precision", "fp32"]
    argv += ["--sampling.max_tokens", "4", "--data.path", "x", "--reward.path", "numeric_match"]
    argv += ["--data", *paths, "--samples", "4", "--by", "level"]
    argv += ["--json", f"{tmp_path}/s.json", "--completions", f"{tmp_path}/c.jsonl"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert f"{paths[1]}: 4 prompts, 0 too long and skipped\nodd: " in out
    found = json.loads((tmp_path / "s.json").read_text())
    completions = [json.loads(x) for x in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in completions[::4]] == [row["answer"] for row in rows]
    for path, part in zip(paths, (completions[:16], completions[16:]), strict=True):
        rewards = np.array([row["numeric_match"] for row in part]).reshape(4, 4)
        assert found[path]["accuracy"] == pytest.approx(rewards.mean())
        assert found[path]["pass@k"]["4"] == pytest.approx(rewards.max(axis=1).mean())
        assert found[path]["by"]["even"]["prompts"] == 2

    assert main([*argv, "--by", "lvl"]) == 1
    assert "--by lvl: a row has no such column; it has prompt" in capsys.readouterr().err
