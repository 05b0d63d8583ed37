import dataclasses
import inspect
import math
from pathlib import Path

import numpy as np
import pytest

from jaxrl.config import toml_file
from jaxrl.config.alarms import AlarmsConfig
from jaxrl.config.training import Config
from jaxrl.diagnostics.alarms.check import replay_alarms
from jaxrl.diagnostics.alarms.limits import Limits
from jaxrl.diagnostics.alarms.rules import RULES
from jaxrl.learner.optimizers import usual_learning_rates
from jaxrl.losses import recipes
from jaxrl.losses.recipe import Terms

ROOT = Path(__file__).parent.parent.parent
LIMITS = Limits(warmup=10, window=8)


def usual(step):
    """Returns the metrics of a healthy step: small variations and a rising reward."""
    rng = np.random.default_rng(step)
    return {
        "step": step,
        "reward": 0.01 * step,
        "reward/min": 0.0,
        "reward/p10": 0.0,
        "reward/max": 1.0,
        "kl": 0.02 * (1 + 0.2 * rng.random()),
        "grad_norm": 1 + rng.random(),
        "clip/low": 0.01,
        "clip/high": 0.009,
        "diversity/distinct": 0.8 + 0.1 * rng.random(),
        "diversity/identical": 0.3,
        "diversity/repetition": 0.2,
        "completion/truncated": 0.1,
        "completion/marks": 0.02,
        "completion_length": 20 + rng.random(),
        "entropy/sampled": 0.5,
        "judge/step": float(step),
        "judge/agreement": 0.8,
        "judge/score": 0.5 + 0.1 * rng.random(),
        "judge/reward": 0.01 * step,
        "judge/min": 0.0,
        "judge/max": 1.0,
        "groups/zero_std": 3.0,
        "groups/sampled": 8.0,
        "reward/failed": 0.0,
        "completions": 64.0,
        "probe/sequence_std": 0.3,
        "probe/phantom": 0.001,
    }


def run(steps=40, *, since=30, **changes):
    """Returns a run whose metrics change from step `since` on; `__` stands for /."""
    wrong = {name.replace("__", "/"): value for name, value in changes.items()}
    return [usual(step) | (wrong if step >= since else {}) for step in range(1, steps + 1)]


# Metrics beyond the limit from step 30 on, metrics just within it, and the step of the alarm.
SEEN = {
    "kl_spike": ({"kl": 0.13}, {"kl": 0.09}, 30),
    "kl_with_reward": ({"kl": 0.101}, {"kl": 0.099}, 30),
    "gradient_spike": ({"grad_norm": 11}, {"grad_norm": 4.9}, 30),
    "clipping": ({"clip__low": 0.1}, {"clip__low": 0.08}, 31),
    "diversity": ({"diversity__distinct": 0.2}, {"diversity__distinct": 0.27}, 31),
    "identical": ({"diversity__identical": 0.95}, {"diversity__identical": 0.92}, 37),
    "repetition": ({"diversity__repetition": 0.61}, {"diversity__repetition": 0.59}, 31),
    "formatting": ({"completion__marks": 0.07}, {"completion__marks": 0.055}, 31),
    "length_limit": ({"completion__truncated": 0.5}, {"completion__truncated": 0.49}, 31),
    "length_zero": ({"completion_length": 1.9}, {"completion_length": 2.2}, 31),
    "entropy": ({"entropy__sampled": 0.04}, {"entropy__sampled": 0.06}, 31),
    "judge": ({"judge__agreement": 0.5}, {"judge__agreement": 0.65}, 32),
    "failed_rewards": ({"reward__failed": 8.0}, {"reward__failed": 6.0}, 31),
    "zero_variance": ({"groups__zero_std": 8.0}, {"groups__zero_std": 7.0}, 37),
    "sequence_mismatch": ({"probe__sequence_std": 0.7}, {"probe__sequence_std": 0.59}, 32),
    "phantom": ({"probe__phantom": 0.02}, {"probe__phantom": 0.009}, 31),
}


def test_a_healthy_run_raises_no_alarm():
    assert replay_alarms(run(200), LIMITS) == []


@pytest.mark.parametrize("name", SEEN)
def test_each_rule_fires_beyond_its_limit(name):
    wrong, nearly, step = SEEN[name]
    found = [alarm for alarm in replay_alarms(run(**wrong), LIMITS) if alarm.name == name]
    assert [alarm.step for alarm in found][:1] == [step]
    assert found[0].healthy == step - LIMITS.window
    assert name not in {alarm.name for alarm in replay_alarms(run(**nearly), LIMITS)}


def test_held_out_alarm_needs_a_rising_reward():
    entries = []
    for step in range(1, 41):
        entries.append(usual(step))
        if step % 5 == 0:
            score = 0.6 if step < 30 else 0.45
            entries.append({"step": step, "eval/accuracy": score})
    first, again = replay_alarms(entries, LIMITS)
    assert (first.name, first.step) == ("held_out", 30)
    assert again.step == 39
    assert first.value == pytest.approx(0.15)
    level = [entry | {"reward": 0.1} if "reward" in entry else entry for entry in entries]
    assert replay_alarms(level, LIMITS) == []


def test_a_judge_whose_score_falls_under_a_rising_reward():
    """Of scores between 0 and 1: .8 before, .45 from step 30 on."""
    judged = {"judge__score": 0.45, "judge__agreement": 0.9}
    before = {"judge/score": 0.8}
    entries = [e | (before if e["step"] < 30 else {}) for e in run(45, **judged)]
    first, *_ = replay_alarms(entries, LIMITS)
    assert (first.name, first.step, first.healthy) == ("judge", 31, 23)  # a window ago
    assert first.value == pytest.approx(0.7 / 3)
    assert first.limit == pytest.approx(0.2)
    # Not if the reward falls too, nor on a scale of which that is a small part.
    for change in ({"judge/reward": 0.0}, {"judge/max": 9.0}):
        assert replay_alarms([e | change for e in entries], LIMITS) == []
    # Scores that came late: the healthy step is before the oldest of the three samples.
    late = [e | {"judge/step": e["step"] - 20.0} for e in entries]
    assert replay_alarms(late, LIMITS)[0].healthy == 8


def test_the_last_evaluation_is_judged():
    """No step follows it, and an event affects only later steps."""
    scores = [{"step": step, "eval/accuracy": 0.9 if step < 40 else 0.4} for step in (0, 20, 40)]
    entries = sorted([*run(40), *scores], key=lambda entry: entry["step"])
    for more in ([], [{"step": 40, "event": {"alarm": "held_out", "at": 40, "action": "pause"}}]):
        found = replay_alarms([*entries, *more], LIMITS)
        assert [(alarm.name, alarm.step) for alarm in found] == [("held_out", 40)]


def test_the_healthy_step_may_precede_the_window():
    """It is that of the last best score, or the one before three probes."""
    limits = Limits()
    scores = {25: 0.9, 50: 0.9, 100: 0.85, 150: 0.6}
    scored = [{"step": step, "eval/accuracy": score} for step, score in scores.items()]
    entries = sorted([*run(160), *scored], key=lambda entry: entry["step"])
    (found,) = replay_alarms(entries, limits)
    assert (found.name, found.step, found.healthy) == ("held_out", 150, 50)
    seldom = run(160, since=51, probe__phantom=0.06)
    for entry in seldom:
        if entry["step"] % 25 != 1:
            del entry["probe/phantom"], entry["probe/sequence_std"]
        elif entry["step"] > 51:
            entry["probe/sequence_std"] = 0.9
    found = {
        alarm.name: (alarm.step, alarm.healthy) for alarm in reversed(replay_alarms(seldom, limits))
    }
    assert found == {"phantom": (101, 50), "sequence_mismatch": (126, 75)}
    (stuck, *_) = replay_alarms(skipping(60, skipped=range(33, 61)), Limits(window=2))
    assert (stuck.name, stuck.step, stuck.healthy) == ("not_finite", 42, 32)


def test_rules_are_silent_during_warmup_and_cooldown():
    spikes = {5, 20, 22, 29}
    entries = [usual(s) | ({"grad_norm": 50} if s in spikes else {}) for s in range(1, 40)]
    assert [alarm.step for alarm in replay_alarms(entries, LIMITS)] == [20, 29]


def test_a_fork_begins_at_its_first_step():
    entries = [usual(s) | ({"grad_norm": 50} if s in (5, 20) else {}) for s in range(1, 40)]
    entries[1:10] = beginning([0.5] * 2 + [0.1] * 10, kl=0.5)[1:10]
    entries[2] |= {"reward/failed": 60.0}
    alarms = [alarm[:3] for alarm in replay_alarms(entries, LIMITS)]
    assert alarms == [("failed_rewards", 3, 0), ("kl_spike", 10, 2), ("gradient_spike", 20, 12)]
    forked = [entry | {"step": 100 + entry["step"]} for entry in entries]
    later = [(name, 100 + step, 100 + healthy) for name, step, healthy in alarms]
    assert [alarm[:3] for alarm in replay_alarms(forked, LIMITS)] == later


def test_a_solved_task_may_be_certain():
    changes = {"diversity__identical": 1.0, "entropy__sampled": 0.001}
    assert {a.name for a in replay_alarms(run(**changes), LIMITS)} == {"identical", "entropy"}
    assert replay_alarms(run(**changes, reward=0.95), LIMITS) == []


def test_one_large_penalty_is_not_solved():
    changes = {"diversity__identical": 1.0, "entropy__sampled": 0.001, "reward": 0.3}
    entries = run(**changes)
    for step, p10 in ((5, -100.0), (25, -10.0), (35, 0.0)):
        entries[step - 1] |= {"reward/min": -1000.0, "reward/p10": p10}
    assert {alarm.name for alarm in replay_alarms(entries, LIMITS)} == {"identical", "entropy"}


def beginning(rewards, *, kl):
    """Returns the first steps of a run with these rewards and this KL."""
    return [usual(s) | {"reward": r, "kl": kl} for s, r in enumerate(rewards, 1)]


FALLING = [0.43, 0.44, 0.40, 0.41, 0.38, 0.36, 0.37, 0.35, 0.34, 0.34]


def test_early_kl_without_reward_is_an_alarm():
    limits = Limits()
    (found,) = replay_alarms(beginning(FALLING, kl=0.3), limits)
    assert (found.name, found.step, found.healthy) == ("kl_spike", 10, 0)
    assert "the reward went from 0.435 in the first two steps to 0.352 in the last 5" in found.text
    level = [0.4 + 0.02 * (-1) ** step for step in range(10)]
    assert [a.name for a in replay_alarms(beginning(level, kl=0.3), limits)] == ["kl_spike"]
    (fallen,) = replay_alarms(beginning(FALLING, kl=None), limits)  # a run without a reference
    assert (fallen.name, fallen.value) == ("kl_spike", pytest.approx(0.083))
    assert replay_alarms(beginning(level, kl=0.05), limits) == []
    rising = FALLING[::-1]  # a policy that improves may move
    assert replay_alarms(beginning(rising, kl=0.3), limits) == []
    assert replay_alarms(beginning([0.97] * 10, kl=0.3), limits) == []  # solved
    taught = [entry | {"kl/teacher": 0.1} for entry in beginning(level, kl=0.3)]
    assert replay_alarms(taught, limits) == []


def test_usual_learning_rates_are_published_ones():
    for parameters, low, high in ((1e5, 3e-5, 3e-4), (1.5e9, 3e-7, 3e-6), (32e9, 3e-7, 3e-6)):
        found = usual_learning_rates(int(parameters), adapters=False)
        assert found == pytest.approx((low, high), rel=0.12)
        assert usual_learning_rates(int(parameters), adapters=True) == pytest.approx(
            (10 * low, 10 * high), rel=0.12
        )


def skipping(steps, *, prefix="", skipped):
    """Returns a run with skipped updates in some steps."""
    entries = []
    for step in range(1, steps + 1):
        count = len([s for s in skipped if s <= step])
        norm = {"grad_norm": None, "kl": None} if step in skipped else {"grad_norm": 1.0}
        named = {f"{prefix}{name}": value for name, value in norm.items()}
        entries.append(usual(step) | named | {f"{prefix}skipped_steps": float(count)})
    return entries


@pytest.mark.parametrize("prefix", ["", "value/"])
def test_non_finite_gradients_alarm_during_warmup(prefix):
    (first, again) = replay_alarms(skipping(25, prefix=prefix, skipped=range(1, 26)), LIMITS)
    assert (first.name, first.step, first.value, first.limit) == ("not_finite", 10, 10, 10)
    assert (again.name, again.step) == ("not_finite", 19)  # silent for a window in between
    later = replay_alarms(skipping(60, prefix=prefix, skipped=range(33, 61)), LIMITS)
    assert [(alarm.name, alarm.step) for alarm in later[:1]] == [("not_finite", 42)]
    assert "after step 32, in 10 steps" in later[0].text


def test_settling_loss_scale_is_no_alarm():
    settling = [*range(1, 10), *range(20, 29), 31, 33, 35, 37]
    assert replay_alarms(skipping(60, skipped=settling), LIMITS) == []


def test_missing_metrics_raise_no_alarm():
    bare = [{"step": s, "reward": 0.1, "kl": None, "grad_norm": math.nan} for s in range(1, 60)]
    assert replay_alarms(bare, LIMITS) == []


def test_alarms_depend_on_the_past_only():
    entries = run(60, since=20, kl=0.5, grad_norm=20.0)
    whole = replay_alarms(entries, LIMITS)
    assert {alarm.name for alarm in whole} == {"kl_spike", "kl_with_reward", "gradient_spike"}
    for end in range(len(entries)):
        seen = [alarm for alarm in whole if alarm.step <= end]
        assert replay_alarms(entries[:end], LIMITS) == seen


def test_gradients_compare_with_steps_having_variance():
    """A solved task: every tenth step has reward variance and an ordinary gradient."""
    flat = {"grad_norm": 1e-6, "groups__zero_std": 8.0}
    entries = run(40) + [
        dict(entry, step=40 + i) for i, entry in enumerate(run(100, since=0, **flat))
    ]
    for entry in entries[45::10]:
        entry |= {"grad_norm": 1.2, "groups/zero_std": 7.0}
    assert "gradient_spike" not in {alarm.name for alarm in replay_alarms(entries, LIMITS)}
    entries[-1] |= {"grad_norm": 12.0}
    assert "gradient_spike" in {alarm.name for alarm in replay_alarms(entries, LIMITS)}


def test_probes_of_an_earlier_precision_are_ignored():
    """After a change of precision the first probes in the new one are the reference."""
    limits = dataclasses.replace(LIMITS, window=1)  # an alarm is silent for a step

    def raised(entries):
        return {alarm.name for alarm in replay_alarms(entries, limits) if alarm.step > 30}

    before = run(30, since=0, probe__phantom=0.2, probe__sequence_std=0.1)
    after = [dict(entry, step=30 + entry["step"]) for entry in run(20)]
    event = {"alarm": "phantom", "at": 33, "changes": {"precision": ["phantom", "fp32"]}}
    assert raised([*before, *after]) == {"phantom"}
    switched = [*before, {"step": 30, "event": event}, *after]
    assert raised(switched) == set()
    # The reference is the first probes of the new precision: .3, not .1.
    grown = [dict(e, step=e["step"] + 50) for e in run(20, since=0, probe__sequence_std=0.59)]
    assert raised([*switched, *grown]) == set()
    for entry in grown:
        entry["probe/sequence_std"] = 0.61
    assert raised([*switched, *grown]) == {"sequence_mismatch"}


def test_every_alarm_names_existing_keys_to_change():
    known = {*toml_file.keys(Config)}
    functions = (Terms, *(getattr(recipes, name) for name in recipes.__all__))
    known |= {f"loss.{name}" for f in functions for name in inspect.signature(f).parameters}
    named = {key for rule in RULES.values() for key in rule.cause.keys}
    assert named <= known


@pytest.mark.parametrize("name", RULES)
def test_rules_are_explained_alike_everywhere(name):
    cause = RULES[name].cause
    keys = ", ".join(f"`{key}`" for key in cause.keys)
    row = f"| `{name}` | {cause.condition} | {cause.causes} | {keys} |"
    assert row in (ROOT / "docs/alarms.md").read_text().splitlines()
    assert AlarmsConfig.model_fields[name].description == cause.condition


def test_rules_use_given_limits():
    steps = run(kl=0.13)
    assert replay_alarms(steps, LIMITS)
    assert not replay_alarms(steps, dataclasses.replace(LIMITS, kl_floor=1.0))
