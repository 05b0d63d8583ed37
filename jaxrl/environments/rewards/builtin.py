"""What a single answer is worth: functions of the completion's text and the data's row.

A reward is any `(completion: str, example: Mapping) -> float`. `example` is the row of the data, in
which `prompt` and `answer` are the columns that the config names. A reward of the user's own comes
from `file.py:function`.
"""

import re
import secrets
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jaxrl.environments.isolation.calls import side_by_side
from jaxrl.environments.isolation.sandbox import run_python
from jaxrl.environments.rewards import mathematics

_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])-?\$?\.\d+")


def exact_match(completion: str, example: Mapping[str, Any]) -> float:
    """1 if the completion is the answer, apart from white space around both; else 0."""
    return float(completion.strip() == str(example["answer"]).strip())


def numeric_match(completion: str, example: Mapping[str, Any]) -> float:
    r"""1 if the completion's final number equals the answer's; else 0.

    The final number is the one after the last `####` (GSM8K), else the one in the last \boxed{},
    else the last of the text. Thousands separators and currency signs do not matter: `$1,000.00`
    equals `1000`.

    Raises:
      ValueError: if the reference answer holds no number; the data and the reward do not fit.
    """
    expected = final_number(str(example["answer"]))
    if expected is None:
        raise ValueError(f"numeric_match: the reference answer {example['answer']!r} has no number")
    return float(final_number(completion) == expected)


@side_by_side
def math_verify(completion: str, example: Mapping[str, Any]) -> float:
    r"""1 if the completion ends in an expression that equals the answer as mathematics; else 0.

    `\frac{1}{2}`, `0.5` and `1/2` are equal, and so are `(x+1)^2` and `x^2+2x+1`: the library
    math-verify compares them. The reference answer is an expression, or a text that marks it by
    `$...$` or `\boxed{...}`.

    What takes more than 5 seconds of computing to compare is not equal.

    Raises:
      ValueError: if the reference answer holds no expression.
      ModuleNotFoundError: without the package math-verify.
    """
    answer = str(example["answer"]).strip()
    marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    return float(mathematics.equal(answer if marked else f"${answer}$", completion))


def boxed_format(completion: str, example: Mapping[str, Any]) -> float:
    r"""1 if the completion gives exactly one \boxed{...}; else 0."""
    return float(len(re.findall(r"\\boxed\{[^{}]+\}", completion)) == 1)


def hash_format(completion: str, example: Mapping[str, Any]) -> float:
    """1 if the completion's last line is `#### number`; else 0."""
    lines = completion.strip().splitlines()
    marked = re.fullmatch(r"####\s*(.+)", lines[-1].strip()) if lines else None
    return float(marked is not None and _NUMBER.fullmatch(marked[1].strip()) is not None)


@side_by_side
def python_tests(completion: str, example: Mapping[str, Any]) -> float:
    """1 if the completion's Python passes all of the example's tests, in the sandbox; else 0.

    The code is that of the last fenced block, else the whole completion. `example["tests"]` is a
    text, or a list of texts, of Python that raises where the code is wrong, such as MBPP's asserts.
    They test what the code defines: what it does only as the main program (`__name__`) is not run.

    Raises:
      SandboxError: if this machine offers no sandbox.
    """
    fenced = re.findall(r"```(?:python|py)?\n(.*?)```", completion, re.DOTALL)
    tests = example["tests"]
    # Code that ends the program before the tests must not pass: only what comes after them counts,
    # and while the code or the tests run it is not there to be found.
    passed = secrets.token_hex(8)
    then = [tests if isinstance(tests, str) else "\n".join(tests), f"print({passed!r})"]
    ran = run_python(fenced[-1] if fenced else completion, then=then)
    return float(ran.status == 0 and ran.stdout.endswith(f"{passed}\n"))


def brevity(completion: str, example: Mapping[str, Any]) -> float:
    """Minus the number of characters in thousands; a small weight prefers shorter answers."""
    return -len(completion) / 1000


def final_number(text: str) -> Decimal | None:
    """The number that a text ends up with, as `numeric_match` reads it; None without one."""
    if "####" in text:
        found = _NUMBER.findall(text.rpartition("####")[2])[:1]
    else:
        boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
        found = _NUMBER.findall(boxed[-1] if boxed else text)[-1:]
    return Decimal(re.sub(r"[$,]", "", found[0])) if found else None
