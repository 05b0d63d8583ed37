"""What a reader of the page sees first, and what it says of runs with little to show."""

import itertools

import pytest

from jaxrl.commands.report.collect import collect
from jaxrl.commands.report.command import render
from tests.browser import CHROMIUM, open_page
from tests.commands.report.made_up import entry, write

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium on PATH (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def evaluated(step, accuracy):
    return {"step": step, "time": 0.0, "eval/accuracy": accuracy}


def groups(step):
    return {"groups/right": float(step), "groups/mixed": 40.0 - step, "groups/wrong": 0.0}


def show(page, tmp_path, runs, *, width=390, steps=40):
    """Opens the page of runs, {name: entries}."""
    found = []
    for name, entries in runs.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name / "metrics.jsonl", entries)
        (tmp_path / name / "config.toml").write_text(f"[train]\nsteps = {steps}\n")
        found.append(collect(tmp_path / name, name=name))
    file = tmp_path / "page.html"
    file.write_text(render(found))
    page.open(file, width=width, dark=False)
    assert page.errors == []


def sentence(page):
    said = page.run("document.getElementById('outcome').textContent")
    assert " %" not in said  # a figure and its unit stay on one line
    return said.replace("\u2011", "-").replace("\u00a0", " ")


def test_a_phone_shows_the_outcome_and_the_main_chart_first(page, tmp_path):
    entries = [evaluated(0, 0.275), *(entry(s, slope=0.01) for s in range(1, 41))]
    show(page, tmp_path, {"run": [*entries, evaluated(40, 1.0)]})
    assert sentence(page) == "Held-out accuracy rose from 27.5 % to 100.0 % in 40 steps."
    size, weight = page.run(
        "(({ fontSize, fontWeight }) => [parseFloat(fontSize), +fontWeight])"
        "(getComputedStyle(document.getElementById('outcome')))"
    )
    assert size >= 20
    assert weight == 750
    bottom = "document.querySelector('#hero .card').getBoundingClientRect().bottom"
    assert page.run(bottom) < 667  # of the smallest phones in use
    # Two columns of tiles, and each of their lines is one line.
    lefts = page.run("[...document.querySelectorAll('.tile')].map((e) => e.offsetLeft)")
    assert len(set(lefts)) == 2
    lines = "[...document.querySelectorAll('.tile > div')].filter((e) => e.textContent)"
    assert page.run(
        f"{lines}.every((e) => e.clientHeight < 1.6 * parseFloat(getComputedStyle(e).fontSize))"
    )
    assert page.run(f"{lines}.every((e) => e.scrollWidth <= e.clientWidth)")
    weights = (
        "new Set([...document.querySelectorAll('*')].map((e) => +getComputedStyle(e).fontWeight))"
    )
    assert set(page.run(f"[...{weights}]")) == {400, 600, 750}
    # No alarm: a chip, and no section.
    assert page.run("document.getElementById('alarm-chip').textContent") == "no alarms"
    assert page.run("document.getElementById('alarms').offsetHeight") == 0


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ({"a": [entry(1, slope=0.5)]}, "Reward is 0.5, after 1 of 40 steps."),
        (
            {"a": [entry(s, slope=-0.01) for s in range(1, 21)]},
            "Reward fell from -0.01 to -0.2 after 20 of 40 steps.",
        ),
        (
            {"a": [evaluated(0, 0.5), entry(40, slope=0.1), evaluated(40, 0.5)]},
            "Held-out accuracy stayed at 50.0 % in 40 steps.",
        ),
        (
            {"a": [{"step": s, "loss": 2.0 / s} for s in (1, 40)]},
            "Loss fell from 2 to 0.05 in 40 steps.",
        ),
        (
            {n: [evaluated(40, accuracy)] for n, accuracy in (("a", 0.5), ("b", 0.75))},
            "b ends with the highest held-out accuracy, 75.0 %, of 2 runs.",
        ),
        (
            {n: [{"step": 40, "loss": 0.5}] for n in "abc"},
            "All 3 runs end with the same loss, 0.5.",
        ),
    ],
)
def test_one_sentence_says_the_outcome(page, tmp_path, runs, said):
    show(page, tmp_path, runs)
    assert sentence(page) == said


def test_a_run_of_one_step_has_markers_and_whole_steps(page, tmp_path):
    show(page, tmp_path, {"run": [entry(1, slope=0.5) | groups(1)]}, width=1400)
    # Every chart has a point of its colour, also those of quantiles and of parts.
    assert page.run("drawn.every((u) => u.series.slice(1).some((s) => s.points.show(u, 1)))")
    coloured = """drawn.map((u) => {
      const { data } = u.ctx.getImageData(0, 0, u.ctx.canvas.width, u.ctx.canvas.height);
      let found = 0;
      for (let i = 0; i < data.length; i += 4)
        if (data[i + 3] > 200 && Math.abs(data[i] - data[i + 2]) > 60) found++;
      return found;
    })"""
    assert min(page.run(coloured)) > 10
    ticks = page.run("drawn.flatMap((u) => u.axes[0]._values)")
    assert ticks
    assert all(text in ("0", "1", "2") for text in ticks)


def test_step_axes_have_whole_numbers(page, tmp_path):
    show(page, tmp_path, {"run": [entry(s, slope=0.1) for s in range(1, 4)]}, width=1400)
    ticks = set(page.run("drawn.flatMap((u) => u.axes[0]._values)"))
    assert {"1", "2", "3"} <= ticks <= {"0", "1", "2", "3"}


def test_a_beta_of_zero_is_called_exact(page, tmp_path):
    entries = [entry(s, slope=0.1) for s in range(1, 41)]
    exact = [e | ({"probe/beta_std": 0.0} if "probe/beta_std" in e else {}) for e in entries]
    show(page, tmp_path, {"run": exact}, width=1400)
    ends = page.run("drawn.flatMap((u) => u.series.map((s) => s.ends ?? ''))")
    assert "beta 0 (exact)" in ends
    heads = page.run("[...document.querySelectorAll('.chart h3')].map((e) => e.textContent)")
    chart = f"drawn[{heads.index('Alpha against beta')}]"
    assert page.run(f"{chart}.series[2].says({chart}.series[2].reads(11))") == "0 (exact)"


def test_rewards_of_0_and_1_are_shown_by_group(page, tmp_path):
    show(page, tmp_path, {"run": [entry(s, slope=0.01) | groups(s) for s in range(1, 41)]})
    heads = page.run("[...document.querySelectorAll('.chart h3')].map((e) => e.textContent)")
    assert "Groups by outcome" in heads
    assert "Reward, distribution" not in heads
    chart = f"drawn[{heads.index('Groups by outcome')}]"
    assert page.run(f"{chart}.series.slice(1).map((s) => [s.label, s.reads(30)])") == [
        ["wrong", 0],
        ["mixed", 10],
        ["right", 30],
    ]
    # Of other rewards some steps happen to have only 0 and 1.
    (tmp_path / "other").mkdir()
    mostly = [entry(s, slope=0.01) | (groups(s) if s > 1 else {}) for s in range(1, 41)]
    show(page, tmp_path / "other", {"run": mostly})
    heads = page.run("[...document.querySelectorAll('.chart h3')].map((e) => e.textContent)")
    assert "Groups by outcome" not in heads
    assert "Reward, distribution" in heads


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_grids_have_no_holes(page, tmp_path, width):
    show(page, tmp_path, {"run": [entry(s, slope=0.01) for s in range(1, 41)]}, width=width)
    ends = page.run(
        """[...document.querySelectorAll('.grid, .tiles')].map((grid) => {
          const rows = new Map(), box = grid.getBoundingClientRect();
          for (const card of grid.children) {
            const { top, right } = card.getBoundingClientRect();
            rows.set(top, Math.max(rows.get(top) ?? 0, right));
          }
          return [...rows.values()].map((right) => Math.round(box.right - right));
        })"""
    )
    assert len(ends) >= 5
    assert all(gap == 0 for rows in ends for gap in rows)


def test_labels_of_eight_runs_do_not_overlap(page, tmp_path):
    runs = {f"run{i}": [entry(s, slope=0.01) for s in range(1, 41)] for i in range(8)}
    show(page, tmp_path, runs, width=1400)
    places = page.run("apart([5, 5, 6, 50, 90, 90, 90, 90], 100)")
    assert all(b - a >= 13 for a, b in itertools.pairwise(places))
    assert min(places) >= 0
    assert max(places) <= 100
    assert len(set(page.run("drawn[0].series.slice(1).map((s) => s.stroke())"))) == 8
