"""The page of invented runs with known numbers, in a real browser if one is installed."""

import pytest

from jaxrl.commands.report.collect import collect
from jaxrl.commands.report.command import render
from tests.browser import CHROMIUM, open_page
from tests.commands.report.made_up import ALARM, SAMPLE, entry, write

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium on PATH (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    named = {"first": "first", "second": "second-with-a-name-that-a-phone-cannot-show-in-a-line-0"}
    found = [collect(runs / run, name=name) for run, name in named.items()]
    file.write_text(render(found))
    with open_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.file = file
        yield opened


@pytest.mark.parametrize(("width", "dark"), [(390, True), (820, False), (1400, False)])
def test_page_fits_every_width_and_theme(page, width, dark):
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


def readout(page):
    """The step of the readout, and its names and values."""
    rows = page.run(
        "[...document.querySelectorAll('#readout .row')].map((row) =>"
        "[row.querySelector('.name').textContent, row.querySelector('.number').textContent])"
    )
    head = page.run("document.querySelector('#readout > div').textContent")
    return int(head.removeprefix("step ")), *rows


def test_run_choice_and_curve_hover(page):
    page.open(page.file, width=1400, dark=False)
    labels = "drawn[0].series.map((s) => s.ends ?? '').join(' ')"  # at the ends of the lines
    assert "first 0.4" in page.run(labels)
    assert "0 0.8" in page.run(labels)
    assert page.run("document.querySelectorAll('.alarm').length") == 2
    assert page.run("document.querySelectorAll('.u-legend').length") == 0
    page.hover(".chart .u-over")
    page.run("new Promise((done) => setTimeout(done, 100))")
    # One readout for all runs, the highest first.
    step, high, low = readout(page)
    assert [name.split("-")[0] for name, _ in (high, low)] == ["second", "first"]
    assert float(high[1]) == pytest.approx(0.02 * step)
    assert float(low[1]) == pytest.approx(0.01 * step)
    page.run("document.getElementById('run-0').click()")
    assert "first" not in page.run(labels)
    assert page.run("document.querySelectorAll('.alarm').length") == 1
    page.hover(".chart .u-over")
    page.run("new Promise((done) => setTimeout(done, 100))")
    step, (_, reward) = readout(page)
    assert 1 < step < 40
    assert float(reward) == pytest.approx(0.02 * step)
    assert page.errors == []


def choose(page, key, value):
    page.run(
        f"(() => {{ const s = document.getElementById('completion-{key}'); s.value = '{value}';"
        "s.dispatchEvent(new Event('change')); })()"
    )


def test_completions_are_sorted_and_coloured(page):
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
    for tint in ("betas", "entropies"):
        choose(page, "tint", tint)
        strength = [float(t.rstrip(")").split(",")[-1]) for t in page.run(tints)[:2]]
        assert strength[0] < strength[1]
    choose(page, "tint", "probabilities")
    strength = [float(t.rstrip(")").split(",")[-1]) for t in page.run(tints)[:2]]
    assert strength[0] < strength[1]  # the less probable, the stronger
    page.hover(".token")
    assert (
        page.run("document.getElementById('tip').textContent")
        == '"4"\nadvantage 0.5\nprobability 0.9\nentropy 0.2\nbeta 0.001'
    )
    assert page.run("document.getElementById('tip').hidden") is False
    assert page.errors == []


def test_siblings_are_side_by_side(page):
    page.open(page.file, width=1400, dark=False)
    cards = "[...document.querySelectorAll('.prompt-card')]"
    assert page.run(f"{cards}.map((e) => e.querySelectorAll('.completion').length)") == [2, 1]
    assert page.run(f"{cards}[0].querySelector('.answer').textContent") == "reference answer 4"
    tops = "e.querySelectorAll('.completion').values().map((c) => c.offsetTop).toArray()"
    above, below = page.run(f"((e) => {tops})({cards}[0])")
    assert above == below
    numbers = page.run(f"{cards}[0].querySelector('.numbers').textContent").split()
    assert " ".join(numbers) == "reward 1 exact 1 brevity -0.5 advantage 0.5 tokens 3 #"


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


def test_a_constant_is_named_and_not_drawn(page):
    page.open(page.file, width=1400, dark=False)
    titles = page.run("[...document.querySelectorAll('.chart h3')].map((e) => e.textContent)")
    assert "Learning rate" not in titles
    constants = "[...document.querySelectorAll('.constants')].map((e) => e.textContent).join(' ')"
    assert "learning rate 1.0e-4" in page.run(constants)


def test_a_curve_ends_where_its_run_ends(page, runs, tmp_path):
    for name, steps in (("long", 40), ("short", 20)):
        (tmp_path / name).mkdir()
        entries = [entry(step, slope=0.01) for step in range(1, steps + 1)]
        write(tmp_path / name / "metrics.jsonl", entries)
    file = tmp_path / "page.html"
    file.write_text(render([collect(tmp_path / n, name=n) for n in ("long", "short")]))
    page.open(file, width=1400, dark=False)
    assert page.run("drawn[0].series.slice(1).map((s) => s.reads(30))") == [0.3, None]
    assert page.run("drawn[0].series.slice(1).map((s) => s.ends)") == ["long 0.4", "short 0.2"]


def test_smoothing_is_a_trailing_mean(page):
    page.open(page.file, width=1400, dark=False)
    page.run(
        "(() => { const s = document.getElementById('smoothing'); s.value = '5';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    labels = page.run("drawn[0].series.map((s) => s.label)")
    values = page.run("drawn[0].data.map((v) => [...v])")[labels.index("first")]
    assert values[:2] == pytest.approx([0.01, 0.015])
    assert values[9] == pytest.approx(0.08)


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


def test_page_shows_discarded_steps(page, gone_back, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(render([collect(gone_back, name="back")]))
    page.open(file, width=1400, dark=False)
    heads = page.run("[...document.querySelectorAll('.alarm h3')].map((e) => e.textContent)")
    assert heads[1:] == [
        "step 8: gradient-norm spike, paused, discarded by rollback 1",
        "step 12: no group has reward variance, discarded by rollback 1",
        "step 12: KL spike or falling reward, rollback 1",
    ]
    assert page.run("drawn[0].series.slice(1).map((s) => s.label)") == [
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


def test_only_servers_are_linked(page, tmp_path):
    write(tmp_path / "metrics.jsonl", [entry(1, slope=0.1)])
    urls = '["http://one:8000", "https://two/", "javascript:alert(1)"]'
    (tmp_path / "config.toml").write_text(f"[sampler]\nurl = {urls}\n")
    file = tmp_path / "page.html"
    file.write_text(render([collect(tmp_path, name="run")]))
    page.open(file, width=1400, dark=False)
    links = page.run("[...document.querySelectorAll('#facts a')].map((a) => a.href)")
    assert links == ["http://one:8000/metrics", "https://two/metrics"]
    assert page.errors == []
