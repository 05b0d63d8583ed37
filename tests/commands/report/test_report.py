"""The data of the page: of invented runs with known numbers."""

import json
import re
from pathlib import Path

import pytest

from jaxrl.cli import main
from jaxrl.commands.report.charts import charts_of
from jaxrl.commands.report.collect import collect
from jaxrl.commands.report.command import names
from tests.commands.report.made_up import ALARM, SAMPLE, entry, write


def test_page_holds_the_data_and_loads_nothing(runs, capsys):
    assert main(["report", str(runs / "first")]) == 0
    assert "1 run, 1 alarms" in capsys.readouterr().out
    page = (runs / "first/report.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    (run,) = json.loads(data)
    assert run["series"]["reward"] == [list(range(1, 41)), [s / 100 for s in range(1, 41)]]
    assert run["config"]["loss.kl"] == 0.01
    assert "loss" not in run["series"]
    (alarm,) = run["alarms"]
    assert (alarm["title"], alarm["at"]) == ("KL spike or falling reward", 20)
    assert "optimizer.learning_rate" in alarm["keys"]
    assert run["samples"][2] == SAMPLE
    assert run["seconds"] == pytest.approx(40 * 1.5)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert len(page) < 200_000


def test_two_runs_on_one_page(runs, tmp_path, capsys):
    file = tmp_path / "new" / "compared.html"
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    assert main(["report", str(runs / "second"), str(runs / "first"), "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 2 runs, 2 alarms\n"
    (data,) = re.findall(
        r'type="application/json" id="data">(.*?)</script>', file.read_text(), re.S
    )
    assert [(run["name"], run["config"]["loss.kl"]) for run in json.loads(data)] == [
        ("second", 0.02),
        ("first", 0.01),
    ]
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_unknown_alarm_is_shown_by_its_name(tmp_path):
    event = {**ALARM, "alarm": "of_tomorrow", "text": "it is late"}
    write(
        tmp_path / "metrics.jsonl", [entry(20, slope=0.1), {"step": 20, "time": 0, "event": event}]
    )
    (alarm,) = collect(tmp_path, name="new")["alarms"]
    assert (alarm["title"], alarm["text"], alarm["keys"]) == ("of_tomorrow", "it is late", ())


def test_directory_without_a_run_is_rejected(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "is not a run" in capsys.readouterr().err


def test_discarded_steps_are_kept(gone_back):
    found = collect(gone_back, name="back")
    assert [(a["alarm"], a["action"], a.get("rollback")) for a in found["alarms"]] == [
        ("entropy", "log", None),
        ("gradient_spike", "pause", 1),
        ("zero_variance", "log", 1),
        ("kl_spike", "rollback", None),
    ]
    (discarded,) = found["rolled_back"]
    assert discarded["series"]["reward"] == [
        list(range(6, 13)),
        pytest.approx([0.2 * s for s in range(6, 13)]),
    ]
    assert found["series"]["reward"][0] == list(range(1, 10))
    assert [(s["step"], s.get("rollback")) for s in found["samples"]] == [
        (4, None),
        (8, None),
        (8, 1),
        (12, 1),
    ]


def test_page_holds_only_what_it_draws(tmp_path):
    parts = {"reward/exact": 0.5, "reward/kl": -0.1, "reward/std": 0.5}
    parts |= {"reward/failed": 0.0, "reward/exact/failed": 1.0}
    other = {"mismatch/chi2": 0.1, "mismatch/token_mult_error": 1.1, "ratio/mean": 1.0}
    entries = [entry(s, slope=0.1) | parts | other | {"time/step": 1.0} for s in range(1, 4)]
    write(tmp_path / "metrics.jsonl", entries)
    found = collect(tmp_path, name="run")
    assert {"reward", "reward/exact", "reward/kl", "reward/p10", "time/score"} <= set(
        found["series"]
    )
    assert not {"reward/std", "reward/exact/failed", "ratio/mean", "time/step"} & {*found["series"]}
    charts = {chart["title"]: chart["metrics"] for chart in charts_of(found["series"])}
    assert charts["Failed rewards"] == {"reward/failed": "failed"}
    assert charts["Reward, parts"] == {"reward/exact": "exact", "reward/kl": "kl"}
    # One unit in each chart.
    assert set(charts["Chi-square at every step"]) == {"mismatch/chi2"}
    assert set(charts["Multiplicative error at every step"]) == {"mismatch/token_mult_error"}
    assert {name for metrics in charts.values() for name in metrics} == set(found["series"])


def test_loss_comes_first_without_rewards():
    known = {"loss", "eval/accuracy", "grad_norm"}
    first, second = charts_of(known)
    assert set(first["metrics"]) == {"loss", "eval/accuracy"}
    assert set(second["metrics"]) == {"grad_norm"}
    assert charts_of(known | {"reward"})[0]["title"] == "Reward"


def test_runs_get_the_shortest_distinct_names(tmp_path):
    a, b = tmp_path / "x" / "run", tmp_path / "y" / "run"
    assert names([a]) == ["run"]
    assert names([a, b]) == ["x/run", "y/run"]
    assert names([a, a]) == [f"{a} (1)", f"{a} (2)"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_under_the_page_is_told(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert main(["report", str(tmp_path), "--out", "/dev/full"]) == 1
    told = capsys.readouterr().err
    assert told == "jaxrl report: No space left on device; make room where it writes\n"
