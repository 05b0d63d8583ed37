import pytest

from jaxrl.tracking import display
from jaxrl.tracking.display import format_duration, seconds_left


def test_time_left_follows_the_median_step():
    times = [(step, 3.0 * step + (500 if step > 25 else 0)) for step in range(1, 31)]  # 25 compiled
    assert seconds_left(times, total=100) == pytest.approx(3 * 70)
    assert seconds_left(times[:1], total=100) is None
    assert seconds_left([(10, 0.0), (20, 30.0)], total=40) == pytest.approx(3 * 20)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.9, "0:59"), (719.7, "11:59"), (3600, "1:00:00"), (36_125, "10:02:05")],
)
def test_durations_never_show_sixty_seconds(seconds, text):
    assert format_duration(seconds) == text


def test_the_display_ignores_entries_of_evaluations(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with display.ProgressDisplay("train", start_step=4, total_steps=10) as shown:
        for step, seconds in ((5, 100.0), (6, 120.0), (6, 7.0), (7, 113.0)):
            now += seconds
            shown.update(step, {"reward": 0.5})
    # A step takes 120 s; the second entry of step 6 is an evaluation's.
    assert capsys.readouterr().err.splitlines()[-1].endswith("step 7/10: reward 0.500, 6:00 left")


def test_a_loss_that_rounds_to_zero_has_no_sign(capsys):
    with display.ProgressDisplay("train", start_step=0, total_steps=1) as shown:
        shown.update(1, {"loss": -1e-9})
    assert capsys.readouterr().err == "step 1/1: loss 0.0000\n"


def test_time_left_omits_the_first_step(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with display.ProgressDisplay("train", start_step=0, total_steps=4) as shown:
        # An evaluation before the first step, a first step that compiles, an ordinary one.
        for step, seconds in ((0, 50.0), (1, 900.0), (2, 10.0)):
            now += seconds
            shown.update(step, {"reward": 0.5})
    assert capsys.readouterr().err.splitlines() == [
        "step 0/4: reward 0.500, compiling",
        "step 1/4: reward 0.500",
        "step 2/4: reward 0.500, 0:20 left",
    ]
