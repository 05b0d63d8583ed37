"""Reward functions that a config names: `(completion: str, example: Mapping) -> float`.

`example` is the row of the data. Its keys `prompt` and `answer` are the columns that the config
names; `rendered_prompt` is the text that the model read. A config names a user's own reward
function as `file.py:function`.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.environments.isolation.calls import uses_processes
from jaxrl.environments.isolation.sandbox import run_tests
from jaxrl.environments.rewards import mathematics, numbers
from jaxrl.environments.rewards.batches import batched

# A block with its language, or text between fences on one line, which begins no block.
_FENCED = re.compile(r"```[^\n`]+```|```([^\n`]*)\n(.*?)```", re.DOTALL)
_PYTHON = re.compile(r"\s*(?:py(?:thon)?3?\b.*)?", re.IGNORECASE)  # or no language


def exact_match(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the completion equals the answer, both stripped; else 0."""
    return float(completion.strip() == str(example["answer"]).strip())


def numeric_match(completion: str, example: Mapping[str, Any]) -> float:
    r"""Returns 1 if the completion's final number equals the answer's; else 0.

    The final number is the one after the last `####` (GSM8K), else the content of the last
    \boxed{}, else the last number in the text. Fractions, powers of ten, separators of thousands
    and each minus sign are read: `\frac{1}{2}` equals `.5`, and `1{,}000` equals `$1,000.00`. Units
    and percent signs are ignored. A box that holds anything but a number, such as
    `\boxed{2\sqrt{3}}` or `\boxed{0,5}`, has none; `math_verify` reads expressions.

    Raises:
      ValueError: if the reference answer is not plainly one number.
    """
    expected = numbers.reference_number(str(example["answer"]))
    if expected is None:
        raise ValueError(
            f"numeric_match: the reference answer {example['answer']!r} is not a number; expected "
            "one such as 1,000, -1/2 or \\boxed{\\frac{1}{2}}; use the reward math_verify for "
            "other expressions, exact_match for texts, or another data.answer_key"
        )
    return float(numbers.final_number(completion) == expected)


@uses_processes
def math_verify(completion: str, example: Mapping[str, Any]) -> float:
    r"""Returns 1 if the completion's final expression equals the answer mathematically; else 0.

    The library math-verify compares them: `\frac{1}{2}`, `0.5` and `1/2` are equal, as are
    `(x+1)^2` and `x^2+2x+1`. The reference answer is an expression, or a text that marks one with
    `$...$` or `\boxed{...}`. Expressions count as different if their comparison takes more than 5
    seconds of CPU time.

    Raises:
      ValueError: if the reference answer contains no expression.
      ModuleNotFoundError: without the package math-verify.
    """
    answer = str(example["answer"]).strip()
    marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    return float(mathematics.equal(answer if marked else f"${answer}$", completion))


def reasoning_gym(completion: str, example: Mapping[str, Any]) -> float:
    """Returns the score of reasoning-gym's own scorer, from 0 to 1, for a row of
    `data.path = "reasoning_gym:TASK"`.

    The answer is the content of the last <answer>...</answer>, else what follows the last </think>.

    Raises:
      ModuleNotFoundError: without the package reasoning-gym.
    """
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    answer = found[-1] if found else completion.rpartition("</think>")[2]
    entry = example["entry"]
    return float(_scorer(entry["metadata"]["source_dataset"])(answer.strip(), entry))


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    import reasoning_gym  # takes seconds

    return reasoning_gym.get_score_answer_fn(task)


def boxed_format(completion: str, example: Mapping[str, Any]) -> float:
    r"""Returns 1 if the completion contains exactly one \boxed{...}; else 0."""
    return float(len([box for box in numbers.boxes(completion) if box]) == 1)


def hash_format(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the completion's last line is `#### number`; else 0."""
    lines = completion.strip().splitlines()
    marked = re.fullmatch(r"####\s*(.+)", lines[-1].strip()) if lines else None
    return float(marked is not None and numbers.bare_number(marked[1]) is not None)


@uses_processes
def python_tests(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the completion's Python passes all of the example's tests; else 0.

    The code is the last fenced block of Python or of no language, else the whole completion.
    `example["tests"]` is Python that raises if the code is wrong, such as MBPP's asserts: a text or
    a list of texts. Code and tests run in two processes of the sandbox; the tests call the code's
    functions through a pipe. The code runs as an imported module, not as `__main__`. Raises as
    `run_tests`.
    """
    blocks = _FENCED.finditer(completion)
    fenced = [b[2] for b in blocks if b[2] is not None and _PYTHON.fullmatch(b[1])]
    tests = example["tests"]
    text = tests if isinstance(tests, str) else "\n".join(tests)
    return float(run_tests(fenced[-1] if fenced else completion, text))


@batched
def novelty(completions: list[str], examples: list[Mapping[str, Any]]) -> list[float]:
    """Returns for each completion the share of its word 3-grams that no other completion of its
    prompt has: a bonus for diversity, which needs a small weight.

    A shorter completion counts as one gram, an empty one as none.
    """
    grams = [_grams(completion.split()) for completion in completions]
    prompts = [str(example["rendered_prompt"]) for example in examples]
    # In how many completions of its prompt a gram occurs.
    counts = Counter((prompt, g) for prompt, own in zip(prompts, grams, strict=True) for g in own)
    return [
        sum(counts[prompt, g] == 1 for g in own) / max(len(own), 1)
        for prompt, own in zip(prompts, grams, strict=True)
    ]


def _grams(words: list[str]) -> set[tuple[str, ...]]:
    size = min(3, len(words))
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} if words else set()


def brevity(completion: str, example: Mapping[str, Any]) -> float:
    """Returns minus the number of characters / 1000; needs a small weight."""
    return -len(completion) / 1000
