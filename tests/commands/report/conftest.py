"""The made-up runs that the tests of the page share."""

import pytest

from tests.commands.report.made_up import ALARM, SAMPLE, entry, write


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
