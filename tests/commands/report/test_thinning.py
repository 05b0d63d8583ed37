import json

import numpy as np

from jaxrl.commands.report.collect import collect, extremes
from jaxrl.diagnostics.alarms.history import Series

TIMES = ("sample", "reward", "score", "update", "publish")


def write(path, entries):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))


def test_thinned_curves_keep_their_extremes():
    values = list(np.random.default_rng(0).normal(size=10_001))
    values[5000], values[7777] = 99.0, -99.0
    steps, kept = extremes(Series(list(range(10_001)), values))
    assert len(kept) <= 2000
    assert steps == sorted(steps)
    assert kept[steps.index(5000)] == 99
    assert kept[steps.index(7777)] == -99
    short = Series([1, 2], [0.5, 0.25])
    assert extremes(short) == [[1, 2], [0.5, 0.25]]


def test_thinned_phase_times_add_up(tmp_path):
    seconds = np.random.default_rng(0).exponential(size=(9_999, len(TIMES))) ** 3
    compiled = [1, 5001]
    for step in compiled:
        seconds[step - 1] = 1000.0
    parts = [dict(zip((f"time/{name}" for name in TIMES), row, strict=True)) for row in seconds]
    entries = [{"step": i, "time": 0.0} | part for i, part in enumerate(parts, start=1)]
    write(tmp_path / "metrics.jsonl", entries)
    write(tmp_path / "starts.jsonl", [{"step": step - 1} for step in compiled])
    drawn = collect(tmp_path, name="long")["series"]
    steps = drawn["time/sample"][0]
    assert 1000 < len(steps) <= 2000
    assert all(drawn[f"time/{name}"][0] == steps for name in TIMES)
    total = np.sum([drawn[f"time/{name}"][1] for name in TIMES], axis=0)
    took = np.delete(seconds.sum(axis=1), np.array(compiled) - 1)
    # All stretches are equally long but the last one.
    size = -(-len(took) // 2000)
    ends = np.arange(0, len(took), size)
    stretches = np.add.reduceat(took, ends) / np.diff([*ends, len(took)])
    np.testing.assert_allclose(total, stretches, rtol=1e-4)
