"""The page of a running run, served."""

import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from jaxrl.cli import main
from jaxrl.commands.report.command import make_page_server
from tests.browser import CHROMIUM, open_page
from tests.commands.report.made_up import entry, write


@contextmanager
def served(run):
    with make_page_server([run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 40\n")
    write(tmp_path / "metrics.jsonl", [entry(s, slope=0.01) for s in range(1, 11)])
    return tmp_path


def ask(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.status, answer.read().decode()


def refused(address, **headers):
    with pytest.raises(urllib.error.HTTPError) as raised:
        ask(address, **headers)
    raised.value.close()
    return raised.value.code


def test_data_is_sent_when_it_changed(run):
    with served(run) as address:
        status, text = ask(f"{address}data?since=")
        found = json.loads(text)
        assert (status, found["runs"][0]["last_step"]) == (200, 10)
        assert {chart["title"] for chart in found["charts"]} > {"Reward", "Entropy"}
        since = f"{address}data?since={found['version']}"
        assert ask(since) == (204, "")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry(11, slope=0.01)) + "\n")
        assert json.loads(ask(since)[1])["runs"][0]["last_step"] == 11


def test_only_this_machine_is_answered(run):
    with make_page_server([run], port=0) as server:
        assert server.server_address[0] == "127.0.0.1"
    with served(run) as address:
        assert ask(address, Host="localhost")[0] == 200
        assert refused(address, Host="evil.example") == 404  # a name resolved to this machine
        assert refused(f"{address}config.toml") == 404
        (run / "metrics.jsonl").write_text("broken\n")
        assert refused(address) == 500


def test_a_run_without_steps_is_waited_for(run):
    (run / "metrics.jsonl").write_text('{"step": 1')
    with served(run) as address:
        assert "No step yet" in ask(address)[1]
        write(run / "metrics.jsonl", [entry(1, slope=0.1)])
        assert 'id="outcome"' in ask(address)[1]


def test_wrong_options_of_follow_are_refused(run, tmp_path, capsys):
    for options, said in (
        (["--follow", "--out", "page.html"], "--follow writes no file"),
        (["--port", "8080"], "--port is the port of the page that --follow serves"),
    ):
        with pytest.raises(SystemExit):
            main(["report", str(run), *options])
        assert said in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing"), "--follow"]) == 1
    assert "is not a run: there is no such directory" in capsys.readouterr().err
    with make_page_server([run], port=0) as taken:
        port = str(taken.server_port)
        assert main(["report", str(run), "--follow", "--port", port]) == 1
    assert f"--port {port}: " in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")
def test_the_page_renews_itself_and_keeps_the_choices(run, tmp_path_factory):
    with served(run) as address, open_page(tmp_path_factory.mktemp("profile")) as page:
        page.open(address, width=800, dark=False)
        page.run("EVERY = 50")
        assert "after 10 of 40 steps" in page.run("document.getElementById('outcome').textContent")
        page.run(
            "(() => { const s = document.getElementById('smoothing'); s.value = '5';"
            "s.dispatchEvent(new Event('change')); })()"
        )
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry(11, slope=0.01)) + "\n")
        page.run(
            """new Promise((done) => { const look = () => /11 of 40/.test(
               document.getElementById('outcome').textContent) ? done() : setTimeout(look, 50);
               look(); })"""
        )
        assert page.run("document.getElementById('smoothing').value") == "5"
        assert page.run("document.getElementById('live').textContent") == "live"
        assert page.errors == []
        # Icons aside, the page asks its own server alone.
        assert all(asked.startswith(address) for asked in page.requests)
