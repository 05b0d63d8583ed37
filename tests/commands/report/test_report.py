"""The page of invented runs with known numbers, in a real browser if one is installed."""

import json
import re

import pytest

from jaxrl.cli import main
from jaxrl.commands.report.charts import charts_of
from jaxrl.commands.report.collect import collect
from jaxrl.commands.report.command import names
from jaxrl.commands.report.html_page import render
from tests.browser import CHROMIUM, open_page

in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium on PATH (Debian: apt-get install chromium)"
)
QUANTILES = ("min", "p10", "p50", "p90", "max")
TIMES = ("sample", "reward", "score", "update", "publish")


def entry(step, *, slope):
    return {
        "step": step,
        "time": float(step),
        "reward": slope * step,
        "kl": 0.01 * step,
        "kl/reference": 0.01 * step,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "loss": None,
        "clip/low": 0.01,
        "clip/high": 0.02,
        "diversity/distinct": 0.9,
        "entropy/sampled": 1.0,
        "tokens_per_second": 1000.0,
        **{f"reward/{q}": slope * step + i for i, q in enumerate(QUANTILES)},
        **{f"completion_length/{q}": 10 + i for i, q in enumerate(QUANTILES)},
        **{f"time/{name}": 0.1 for name in TIMES},
        "time/step": 1.5,
        **({"probe/alpha_std": 0.1 * step, "probe/beta_std": 0.01} if step % 10 == 1 else {}),
        **({"probe/phantom": 0.02, "probe/clipped": 0.05} if step % 10 == 1 else {}),
    }


ALARM = {"alarm": "kl_spike", "at": 20, "action": "log", "value": 0.2, "limit": 0.1}
SAMPLE = {
    "step": 11,
    "group": 7,
    "prompt": "2+2=</script><b>",
    "answer": "4",
    "reward": 1.0,
    "parts": {"exact": 1.0, "brevity": -0.5},
    "length": 3,
    "truncated": False,
    "tokens": ["4", " ", "<end>"],
    "advantages": [0.5, -0.25, None],
    "probabilities": [0.9, 0.25, None],
    "betas": [0.001, -0.02, None],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, slope in (("first", 0.01), ("second", 0.02)):
        run = root / name
        run.mkdir()
        entries = [entry(step, slope=slope) for step in range(1, 41)]
        entries += [{"step": 20, "time": 20.0, "event": {**ALARM, "text": "KL 0.2 nats"}}]
        write(run / "metrics.jsonl", entries)
        low = {**SAMPLE, "reward": 0.0, "step": 1, "prompt": "1+1=", "tokens": ["3", " ", "<end>"]}
        sibling = {**SAMPLE, "reward": 0.0, "tokens": ["5", "<end>"], "advantages": [-0.5, -0.5]}
        write(run / "samples.jsonl", [low, sibling | {"length": 2}, SAMPLE])
        config = f'precision = "fp32"\n[loss]\nname = "grpo"\nkl = {slope}\n[train]\nsteps = 40\n'
        (run / "config.toml").write_text(config)
        start = {"step": 0, "devices": "1 x cpu", "processors": 2, "system": "Linux", "python": "3"}
        write(run / "starts.jsonl", [{**start, "versions": {"jax": "0.10.2"}}])
    return root


def write(path, entries):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))


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
    assert (alarm["title"], alarm["at"]) == ("KL spike", 20)
    assert "optimizer.learning_rate" in alarm["keys"]
    assert run["samples"][2] == SAMPLE
    assert run["seconds"] == pytest.approx(40 * 1.5)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert len(page) < 200_000


def test_two_runs_on_one_page_in_another_directory(runs, tmp_path, capsys):
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


def test_run_without_alarms_is_checked_afterwards(tmp_path):
    entries = [{"step": s, "reward": 0.1, "kl": 0.02 if s < 50 else 3.0} for s in range(1, 60)]
    write(tmp_path / "metrics.jsonl", entries)
    found = collect(tmp_path, name="old")["alarms"]
    assert [(a["alarm"], a["at"], a["action"]) for a in found] == [("kl_spike", 50, "replayed")]


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


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory):
    """Directory of a run that rolled back from step 12 to step 5 and continued to step 9."""
    run = tmp_path_factory.mktemp("back")

    def event(step, name, action, **more):
        content = {"alarm": name, "at": step, "action": action, "text": name, "more": "", **more}
        return {"step": step, "time": 0.0, "event": {"value": 1.0, "limit": 0.5, **content}}

    back = event(12, "kl_spike", "rollback", number=1, to=5, changes={"loss.kl": [0.1, 0.2]})
    scaled = [
        {**entry(s, slope=0.1), "loss_scale": 65536.0, "skipped_steps": s // 5} for s in range(10)
    ]
    write(
        run / "metrics.jsonl",
        [*scaled[1:6], event(3, "entropy", "log"), {**back, "step": 5}, *scaled[6:]],
    )
    discarded = [entry(s, slope=0.2) for s in range(6, 13)]
    raised = [event(8, "gradient_spike", "pause"), event(12, "zero_variance", "log")]
    write(run / "rolled_back_1.jsonl", [*discarded, *raised, event(12, "kl_spike", "rollback")])
    write(run / "samples.jsonl", [SAMPLE | {"step": s, "prompt": f"kept {s}"} for s in (4, 8)])
    bad = [SAMPLE | {"step": s, "prompt": f"discarded {s}", "reward": 0.0} for s in (8, 12)]
    write(run / "rolled_back_1_samples.jsonl", bad)
    return run


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
    parts = {"reward/exact": 0.5, "reward/kl": -0.1, "reward/std": 0.5, "reward/failed": 0.0}
    other = {"mismatch/chi2": 0.1, "mismatch/token_mult_error": 1.1, "ratio/mean": 1.0}
    entries = [entry(s, slope=0.1) | parts | other | {"time/step": 1.0} for s in range(1, 4)]
    write(tmp_path / "metrics.jsonl", entries)
    found = collect(tmp_path, name="run")
    assert {"reward", "reward/exact", "reward/kl", "reward/p10", "time/score"} <= set(
        found["series"]
    )
    assert not {"reward/std", "reward/failed", "ratio/mean", "time/step"} & set(found["series"])
    charts = {chart["title"]: chart["metrics"] for chart in charts_of(found["series"])}
    assert charts["Reward, parts"] == {"reward/exact": "exact", "reward/kl": "kl"}
    assert set(charts["Mismatch at every step"]) == {"mismatch/chi2", "mismatch/token_mult_error"}
    assert {name for metrics in charts.values() for name in metrics} == set(found["series"])


def test_runs_get_the_shortest_distinct_names(tmp_path):
    a, b = tmp_path / "x" / "run", tmp_path / "y" / "run"
    assert names([a]) == ["run"]
    assert names([a, b]) == ["x/run", "y/run"]
    assert names([a, a]) == [f"{a} (1)", f"{a} (2)"]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    named = {"first": "first", "second": "second-with-a-name-that-a-phone-cannot-show-in-a-line-0"}
    found = [collect(runs / run, name=name) for run, name in named.items()]
    file.write_text(render(found))
    with open_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.file = file
        yield opened


@in_browser
@pytest.mark.parametrize(("width", "dark"), [(390, True), (820, False), (1400, False)])
def test_page_is_drawn_at_every_width_in_light_and_dark(page, width, dark):
    page.requests.clear()
    page.open(page.file, width=width, dark=dark)
    titles = page.run("[...document.querySelectorAll('.chart h3')].map((e) => e.textContent)")
    assert "Reward" in titles
    assert "Alpha against beta" in titles
    assert "Time per step: first" in titles
    assert "Loss" not in titles  # it was never finite
    assert page.run("document.documentElement.scrollWidth <= innerWidth")  # nothing to the side
    widths = page.run("[...document.querySelectorAll('.chart .uplot')].map((e) => e.clientWidth)")
    assert len(widths) == len(titles)
    assert min(widths) > 200
    # Every canvas has ink on it, in this scheme's colours.
    inked = "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size > 4"
    assert page.run(f"[...document.querySelectorAll('canvas')].every({inked})")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 23, 26)") == dark
    assert page.errors == []
    assert set(page.requests) == {page.file.resolve().as_uri()}


@in_browser
def test_choosing_a_run_and_hovering_over_a_curve(page):
    page.open(page.file, width=1400, dark=False)
    labels = "[...document.querySelectorAll('.chart .u-legend')][0].textContent"
    assert "first" in page.run(labels)
    assert "second" in page.run(labels)
    assert page.run("document.querySelectorAll('.alarm').length") == 2
    page.run("document.getElementById('run-0').click()")
    assert "first" not in page.run(labels)
    assert page.run("document.querySelectorAll('.alarm').length") == 1
    last = "[...document.querySelectorAll('.chart')][0].querySelector('.u-legend').textContent"
    assert "0.8" in page.run(last)  # without a cursor, the last values
    page.hover(".chart .u-over")
    page.run("new Promise((done) => setTimeout(done, 100))")
    values = page.run(
        "[...document.querySelectorAll('.chart')][0].querySelectorAll('.u-value').values()"
        ".map((e) => e.textContent).toArray()"
    )
    step, reward = map(float, values)
    assert 1 < step < 40
    assert reward == pytest.approx(0.02 * step)
    assert page.errors == []


def choose(page, key, value):
    page.run(
        f"(() => {{ const s = document.getElementById('completion-{key}'); s.value = '{value}';"
        "s.dispatchEvent(new Event('change')); })()"
    )


@in_browser
def test_completions_by_step_and_reward_with_coloured_tokens(page):
    page.open(page.file, width=820, dark=False)
    prompts = "[...document.querySelectorAll('.prompt')].map((e) => e.textContent)"
    assert page.run(prompts) == [SAMPLE["prompt"], "1+1="]

    choose(page, "order", "low")
    assert page.run(prompts) == ["1+1=", SAMPLE["prompt"]]
    choose(page, "step", "11")
    assert page.run(prompts) == [SAMPLE["prompt"]]
    tints = "[...document.querySelectorAll('.token')].map((e) => e.style.background)"
    by_advantage = page.run(tints)
    assert by_advantage[0].startswith("rgba(22, 140, 84")  # up
    assert by_advantage[1].startswith("rgba(200, 48, 48")  # down
    assert by_advantage[2] == ""  # the policy did not choose it
    choose(page, "tint", "betas")
    strength = [float(t.rstrip(")").split(",")[-1]) for t in page.run(tints)[:2]]
    assert strength[0] < strength[1]
    choose(page, "tint", "probabilities")
    strength = [float(t.rstrip(")").split(",")[-1]) for t in page.run(tints)[:2]]
    assert strength[0] < strength[1]  # the less probable, the stronger
    page.hover(".token")
    assert (
        page.run("document.getElementById('tip').textContent")
        == '"4"\nadvantage 0.5\nprobability 0.9\nbeta 0.001'
    )
    assert page.run("document.getElementById('tip').hidden") is False
    assert page.errors == []


@in_browser
def test_siblings_stand_side_by_side_with_their_numbers(page):
    page.open(page.file, width=1400, dark=False)
    cards = "[...document.querySelectorAll('.prompt-card')]"
    assert page.run(f"{cards}.map((e) => e.querySelectorAll('.completion').length)") == [2, 1]
    assert page.run(f"{cards}[0].querySelector('.answer').textContent") == "reference answer 4"
    tops = "e.querySelectorAll('.completion').values().map((c) => c.offsetTop).toArray()"
    above, below = page.run(f"((e) => {tops})({cards}[0])")
    assert above == below
    numbers = page.run(f"{cards}[0].querySelector('.numbers').textContent").split()
    assert " ".join(numbers) == "reward 1 exact 1 brevity -0.5 advantage 0.5 tokens 3 #"


@in_browser
def test_search_and_links_find_completions(page):
    page.open(page.file, width=1400, dark=False)
    shown = "[...document.querySelectorAll('.prompt')].map((e) => e.textContent)"
    search = "document.getElementById('completion-search')"
    page.run(f"{search}.value = '1+1'; {search}.dispatchEvent(new Event('input'))")
    assert page.run(shown) == ["1+1="]
    page.run("location.hash = '#completion-1-2'; new Promise((done) => setTimeout(done, 100))")
    assert page.run(shown) == [SAMPLE["prompt"]]
    assert page.run("document.querySelector('.linked').textContent").startswith("reward 1")
    assert page.errors == []


@in_browser
def test_a_constant_is_named_and_not_drawn(page):
    page.open(page.file, width=1400, dark=False)
    titles = page.run("[...document.querySelectorAll('.chart h3')].map((e) => e.textContent)")
    assert "Learning rate" not in titles
    constants = "[...document.querySelectorAll('.constants')].map((e) => e.textContent).join(' ')"
    assert "learning rate 1.0e-4" in page.run(constants)


@in_browser
def test_a_curve_ends_where_its_run_ends(page, runs, tmp_path):
    for name, steps in (("long", 40), ("short", 20)):
        (tmp_path / name).mkdir()
        entries = [entry(step, slope=0.01) for step in range(1, steps + 1)]
        write(tmp_path / name / "metrics.jsonl", entries)
    file = tmp_path / "page.html"
    file.write_text(render([collect(tmp_path / n, name=n) for n in ("long", "short")]))
    page.open(file, width=1400, dark=False)
    at = "drawn[0].series.slice(1).map((s, i) => s.value(drawn[0], null, i + 1, %s))"
    assert page.run(at % "29") == ["0.3", "-"]
    assert page.run(at % "null") == ["0.4", "0.2"]


@in_browser
def test_smoothing_is_the_mean_of_the_last_steps(page):
    page.open(page.file, width=1400, dark=False)
    page.run(
        "(() => { const s = document.getElementById('smoothing'); s.value = '5';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    labels = page.run("drawn[0].series.map((s) => s.label)")
    values = page.run("drawn[0].data.map((v) => [...v])")[labels.index("first")]
    assert values[:2] == pytest.approx([0.01, 0.015])
    assert values[9] == pytest.approx(0.08)


@in_browser
def test_repeated_alarm_does_not_cross_the_curves(page, tmp_path):
    events = [(step, "log") for step in range(5, 30)] + [(31, "pause"), (35, "log")]
    write(
        tmp_path / "metrics.jsonl",
        [entry(step, slope=0.01) for step in range(1, 41)]
        + [
            {"step": s, "time": 0.0, "event": {**ALARM, "text": "KL", "at": s, "action": action}}
            for s, action in events
        ],
    )
    file = tmp_path / "page.html"
    file.write_text(render([collect(tmp_path, name="run")]))
    page.open(file, width=1400, dark=False)
    crossed = page.run(
        """(() => {
          const { top, left, width, height } = drawn[0].bbox, seen = new Set();
          const place = (share) => [left, top + height * share, width, 12];
          return [0, 0.6].map((share) => {
            const { data } = drawn[0].ctx.getImageData(...place(share)), columns = new Set();
            for (let i = 0; i < data.length; i += 4)
              if (data[i] > 180 && data[i + 1] < 110 && data[i + 2] < 80)
                columns.add(i / 4 % width);
            const kept = [...columns].sort((a, b) => a - b);
            return kept.filter((x, i) => i === 0 || x > kept[i - 1] + 1).length;
          });
        })()"""
    )
    assert crossed == [27, 2]  # at the top all of them, below the first one and the pause
    texts = page.run("[...document.querySelectorAll('.alarm')].map((e) => e.textContent)")
    assert len(texts) == 2
    assert "Raised again after steps 6, 7, 8, 9, 10, 11, 12, 13, ... (16 more), 35." in texts[0]
    assert "Raised again" not in texts[1]
    assert page.errors == []


@in_browser
def test_page_shows_discarded_steps(page, gone_back, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(render([collect(gone_back, name="back")]))
    page.open(file, width=1400, dark=False)
    heads = page.run("[...document.querySelectorAll('.alarm h3')].map((e) => e.textContent)")
    assert heads[1:] == [
        "step 8: gradient-norm spike, paused, discarded by rollback 1",
        "step 12: no group has reward variance, discarded by rollback 1",
        "step 12: KL spike, rollback 1",
    ]
    assert page.run("drawn[0].series.map((s) => s.label)") == [
        "step",
        "reward",
        "reward, discarded by rollback 1",
    ]
    steps, kept, discarded = page.run("drawn[0].data.map((values) => [...values])")
    assert steps == list(range(1, 13))
    assert [v is None for v in kept] == [False] * 9 + [True] * 3
    assert [v is None for v in discarded] == [True] * 5 + [False] * 7
    titles = page.run("[...document.querySelectorAll('.chart h3')].map((e) => e.textContent)")
    scales = page.run(
        f"drawn[{titles.index('Skipped steps, loss scale')}].series.map((s) => s.scale)"
    )
    assert scales == ["x", "y", "right"]
    prompts = "[...document.querySelectorAll('.prompt')].map((e) => e.textContent)"
    assert page.run(prompts) == ["discarded 12", "kept 8", "discarded 8", "kept 4"]
    choose(page, "step", "8, discarded by rollback 1")
    assert page.run(prompts) == ["discarded 8"]
    assert page.errors == []


@in_browser
def test_servers_of_a_run_are_linked_and_nothing_else_is(page, tmp_path):
    write(tmp_path / "metrics.jsonl", [entry(1, slope=0.1)])
    urls = '["http://one:8000", "https://two/", "javascript:alert(1)"]'
    (tmp_path / "config.toml").write_text(f"[sampler]\nurl = {urls}\n")
    file = tmp_path / "page.html"
    file.write_text(render([collect(tmp_path, name="run")]))
    page.open(file, width=1400, dark=False)
    links = page.run("[...document.querySelectorAll('#facts a')].map((a) => a.href)")
    assert links == ["http://one:8000/metrics", "https://two/metrics"]
    assert page.errors == []
