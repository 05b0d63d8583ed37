import math
import threading
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxrl.environments.isolation import calls, sandbox
from jaxrl.environments.rewards import mathematics
from jaxrl.environments.rewards.builtin import (
    boxed_format,
    exact_match,
    hash_format,
    math_verify,
    novelty,
    numeric_match,
)
from jaxrl.environments.rewards.numbers import final_number
from jaxrl.environments.rewards.score import load_rewards, score
from tests.environments.deadlines import SECONDS


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("42", "42", 1),
        ("It is 42.", "42", 1),
        ("21 + 21 = 42", "21 * 2 = <<21*2=42>>42\n#### 42", 1),
        ("12 apples and 3 pears\n#### 15", "#### 15", 1),
        ("#### 15 or was it 16", "#### 15", 1),
        (r"so \boxed{7}, of 3", "7", 1),
        ("$1,000.00", "1000", 1),
        ("1,234,567", "#### 1234567", 1),
        ("-3", "3", 0),
        ("5-3", "3", 1),
        ("0.50", ".5", 1),
        ("41", "42", 0),
        ("no idea", "42", 0),
        ("", "42", 0),
        ("42 #### unsure", "42", 0),
    ],
)
def test_numeric_match_compares_final_numbers(completion, answer, expected):
    assert numeric_match(completion, {"answer": answer}) == expected


@given(st.integers(-(10**12), 10**12), st.text("abc .,\n", max_size=8))
def test_final_number_reads_every_notation(number, text):
    for written in (f"{number}", f"{number:,}", f"{number}.00", f"${number:,}"):
        if number >= 0 or "$" not in written:
            assert final_number(f"{text} {written}") == number


def test_reference_without_number_is_an_error():
    with pytest.raises(ValueError, match="'forty-two' is not a number"):
        numeric_match("42", {"answer": "forty-two"})


def test_formats_are_matched_exactly():
    assert exact_match(" a b\n", {"answer": "a b"}) == 1
    assert exact_match("a", {"answer": "b"}) == 0
    assert boxed_format(r"\boxed{1}", {}) == 1
    assert boxed_format(r"\boxed{1} \boxed{2}", {}) == 0
    assert hash_format("x\n#### 1,000\n", {}) == 1
    assert hash_format("#### 1\nx", {}) == 0


def test_novelty_is_a_share_of_grams_that_are_ones_own():
    """By hand: "a b c d" has the grams abc and bcd; the other completion of p has bcd too."""
    completions = ["a b c d", "x b c d", "a b c d", "a", "", "a b c d"]
    prompts = ["p", "p", "q", "q", "q", "r"]
    examples = [{"rendered_prompt": prompt} for prompt in prompts]
    assert novelty(completions, examples) == [0.5, 0.5, 1.0, 1.0, 0.0, 1.0]
    same = [{"rendered_prompt": "p"}] * 2
    assert novelty(["a b c", "a b c"], same) == [0.0, 0.0]
    (term,) = load_rewards(["novelty"], [0.1])
    scored = score([term], ["a b c d", "x b c d"], examples[:2])
    np.testing.assert_allclose(scored.total, [0.05, 0.05])


REWARDS = """
def half(completion, example):
    return 0.5

def picky(completion, example):
    if completion == "bad":
        raise KeyError("bad")
    if completion == "list":
        return [1.0]
    return None if completion == "none" else float(completion)
"""


def test_failures_are_nan_and_counted(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(REWARDS)
    terms = load_rewards([f"{file}:half", f"{file}:picky"], [2.0, 1.0])
    scored = score(terms, ["3", "bad", "none", "inf"], [{}] * 4)
    assert scored.total[0] == 4.0
    assert all(map(math.isnan, scored.total[1:]))
    assert scored.failures == {"half": 0, "picky": 3}
    assert scored.components["half"].tolist() == [0.5] * 4
    told = f"reward picky failed on completion 'bad': {file}:7 in picky: KeyError: 'bad'"
    assert scored.first_failure == told
    for text, said in (
        ("none", "it returned None; return a number"),
        ("list", "it returned [1.0]; return a number, or mark a function of all completions with"),
        ("inf", "it returned inf"),
    ):
        told = score(terms, [text], [{}]).first_failure or ""
        assert told.startswith(f"reward picky failed on completion {text!r}: {file}:5 in picky: ")
        assert f"ValueError: {said}" in told


DEEP = """
import json

def outer(completion, example):
    return inner(completion)

def inner(completion):
    return json.loads(completion)["x"]

async def later(completion, example):
    return inner(completion)
"""


@pytest.mark.parametrize("name", ["outer", "later"])
def test_a_failure_names_the_last_line_of_the_users_code(tmp_path, monkeypatch, name):
    """Not the line of the library that it called, nor that of jaxrl."""
    (tmp_path / "deep.py").write_text(DEEP)
    monkeypatch.chdir(tmp_path)
    told = score(load_rewards([f"deep.py:{name}"]), ["{", "{}"], [{}] * 2).first_failure or ""
    assert ": deep.py:8 in inner: JSONDecodeError: Expecting property name" in told
    told = score(load_rewards(["numeric_match"]), ["1"], [{"answer": "?"}]).first_failure or ""
    assert ": ValueError: numeric_match: the reference answer" in told


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("exact_mach", "did you mean exact_match?"),
        ("re", "no 're' for this key"),
        ("none.py:f", "the file none.py does not exist"),
        ("{file}:halff", "did you mean half?"),
        ("{broken}:f", "importing .*broken.py failed: ZeroDivisionError"),
        ("no.such.module:f", "importing no.such.module failed"),
    ],
)
def test_unloadable_reward_names_its_key(tmp_path, reference, message):
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("1 / 0")
    reference = reference.format(file=tmp_path / "mine.py", broken=tmp_path / "broken.py")
    with pytest.raises(ValueError, match=r"reward\.path") as error:
        load_rewards([reference])
    error.match(message.replace("?", r"\?"))


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(ValueError, match="twice"):
        load_rewards(["exact_match", "exact_match"])


def test_reward_loads_from_installed_module():
    (term,) = load_rewards(["jaxrl.environments.rewards.builtin:brevity"])
    assert term.function("x" * 1000, {}) == -1


SLOW = """
import asyncio, threading
from tests.environments.deadlines import expire
from jaxrl.environments.rewards.batches import batched

def hangs(completion, example):
    if completion == "hang":
        expire()
        threading.Event().wait()
    return len(completion)

async def remote(completion, example):
    if completion == "hang":
        expire()
    await asyncio.sleep(100 if completion == "hang" else 0)
    return len(completion)

@batched
def ranks(completions, examples):
    return [completions.index(c) for c in completions]

@batched
async def too_few(completions, examples):
    return [1.0]

@batched
def mean(completions, examples):
    return 0.5

def runs(completion, example):
    exec(completion)
    return 1.0

async def runs_later(completion, example):
    return runs(completion, example)
"""


@pytest.mark.parametrize("name", ["runs", "runs_later"])
def test_system_exit_affects_only_its_own_completion(tmp_path, name):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    scored = score(load_rewards([f"{file}:{name}"]), ["x = 1", "exit(0)", "x = 2"], [{}] * 3)
    np.testing.assert_array_equal(scored.total, [1, np.nan, 1])
    assert "SystemExit: 0" in str(scored.first_failure)


@pytest.mark.parametrize("name", ["hangs", "remote"])
def test_a_timeout_affects_only_its_own_completion(tmp_path, watched, name):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    terms = load_rewards([f"{file}:{name}"], timeout=SECONDS)
    scored = score(terms, ["a", "hang", "ccc"], [{}] * 3)
    np.testing.assert_array_equal(scored.total, [1, np.nan, 3])
    assert scored.failures == {name: 1}
    assert scored.first_failure is not None
    assert "it took longer than 100 s" in scored.first_failure


def test_batched_reward_sees_all_completions(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    scored = score(load_rewards([f"{file}:ranks"]), ["a", "b", "a"], [{}] * 3)
    np.testing.assert_array_equal(scored.total, [0, 1, 0])
    scored = score(load_rewards([f"{file}:too_few"]), ["a", "b"], [{}] * 2)
    assert np.isnan(scored.total).all()
    assert "1 rewards for 2 completions" in str(scored.first_failure)
    scored = score(load_rewards([f"{file}:mean"]), ["a", "b"], [{}] * 2)
    assert np.isnan(scored.total).all()
    assert "'float' object is not iterable" in str(scored.first_failure)


def test_a_paused_deadline_does_not_move(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])
    deadline = calls.Deadline(10.0)
    now[0] += 4
    with deadline.paused():
        now[0] += 50
        assert deadline.remaining() == 6
        with deadline.paused():  # another thread of the same call
            now[0] += 50
        assert deadline.remaining() == 6
    assert deadline.remaining() == 6
    now[0] += 7
    assert deadline.remaining() == 0


def test_one_program_per_processor(monkeypatch):
    """Two calls meet, never a third."""
    monkeypatch.setattr(calls, "_PROCESSORS", 8)
    monkeypatch.setattr(calls, "_free", threading.BoundedSemaphore(2))
    meet, running, most = threading.Barrier(2), [], []

    def wait_until_ready(hosts, limits):
        running.append(1)
        most.append(len(running))
        meet.wait(250)
        running.pop()
        return time.monotonic()  # no time to run

    monkeypatch.setattr(sandbox, "_wait_until_ready", wait_until_ready)
    texts = ["pass"] * 8
    scored = score(load_rewards(["python_tests"]), texts, [{"tests": ""}] * 8)
    assert scored.first_failure is None
    assert max(most) == 2


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is \boxed{0.5}", r"\frac{1}{2}", 1),
        ("The answer is 1/2.", r"\frac{1}{2}", 1),
        ("$x^2 + 2x + 1$", "(x+1)^2", 1),
        ("$x^2 + 2x$", "(x+1)^2", 0),
        (r"$\{2, 1\}$", r"$\{1, 2\}$", 1),
        (r"\boxed{42}", "we get $42$", 1),
        (r"\boxed{41}", "we get $42$", 0),
        ("I do not know", "42", 0),
        ("", "42", 0),
    ],
)
def test_math_verify_compares_expressions(completion, answer, expected):
    assert math_verify(completion, {"answer": answer}) == expected


def test_math_verify_works_in_threads():
    """The library's own time limit uses a signal, which fails in a thread."""
    terms = load_rewards(["math_verify"])
    texts, rows = ["1/2", "2", "3"], [{"answer": a} for a in ("0.5", "3", "$$")]
    scored = score(terms, texts, rows)
    np.testing.assert_array_equal(scored.total, [1, 0, np.nan])
    assert "'$$' contains no expression" in str(scored.first_failure)


def test_endless_comparison_is_wrong(monkeypatch):
    """One operation computes the huge number, and no other thread runs meanwhile."""
    monkeypatch.setattr(mathematics, "_SECONDS", 1.0)
    monkeypatch.setattr(mathematics, "_idle", [])
    huge, row = r"\boxed{7^{3^{14}}}", {"answer": "2"}
    (term,) = load_rewards(["math_verify"])
    np.testing.assert_array_equal(score([term], [huge, "2"], [row, row]).total, [0, 1])
    mathematics._end_all()


HOSTILE = """
import itertools, threading
from tests.environments.deadlines import expire
from jaxrl.environments.rewards.batches import batched

@batched
def endless(completions, examples):
    return itertools.count()

@batched
def stalls(completions, examples):
    yield 1.0
    expire()
    threading.Event().wait()

@batched
async def endless_later(completions, examples):
    return itertools.count()

def marks(completion, example):
    example["seen"] = example.get("seen", 0) + 1
    example["list"].append(1)
    return example["seen"] + len(example["list"])

def huge(completion, example):
    return float(completion)

def nothing():
    return 1.0

class Slow:
    def __float__(self):
        expire()
        threading.Event().wait()

def slow(completion, example):
    return Slow()
"""


@pytest.fixture
def hostile(tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    return lambda name, **more: load_rewards([f"{tmp_path}/hostile.py:{name}"], **more)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("endless", "more than 2 rewards for 2 completions"),
        ("endless_later", "more than 2 rewards for 2 completions"),
        ("stalls", "it took longer than 100 s"),
        ("slow", "it took longer than 100 s"),
    ],
)
def test_endless_result_is_a_failure(hostile, watched, name, message):
    scored = score(hostile(name, timeout=SECONDS), ["a", "b"], [{}] * 2)
    assert np.isnan(scored.total).all()
    assert message in str(scored.first_failure)


def test_examples_are_isolated_between_rewards(hostile):
    example = {"list": []}
    scored = score([*hostile("marks")] * 2, ["a", "b"], [example, example])
    assert scored.total.tolist() == [4, 4]
    assert example == {"list": []}


def test_reward_beyond_f32_is_a_failure(hostile):
    (term,) = hostile("huge")
    for weight, good in ((1.0, "1e30"), (1e29, "9"), (0.0, "1e30")):
        texts = ["1e308", "-1e308", "inf", "nan", good]
        scored = score([term._replace(weight=weight)], texts, [{}] * 5)
        assert scored.total.tolist()[4] == weight * float(good)
        assert np.isnan(scored.total[:4]).all() or weight == 0
        assert np.isnan(scored.components["huge"][:4]).all()
        assert "huge failed on completion 'inf'" in str(scored.first_failure)
        told = score([term._replace(weight=weight)], texts[:1], [{}]).first_failure
        assert "reward huge is 1e+308 on one of 1 failed" in str(told)


def test_reward_signature_is_checked(hostile):
    with pytest.raises(ValueError, match=r"nothing': it must take two arguments"):
        hostile("nothing")
