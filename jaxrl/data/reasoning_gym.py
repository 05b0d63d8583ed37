"""Rows of reasoning-gym, which makes tasks by a rule and scores their answers (arXiv:2505.24760).

The reward `reasoning_gym` applies the task's own scorer to such a row.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

REASONING_GYM = "reasoning_gym:"
"""Beginning of a `data.path` that names a task."""

_HELD_OUT = 1_000_000_000  # seed of splits other than "train"; row i is made with seed + i


def task_rows(path: str, *, split: str, named: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Makes the rows of a task: (place for errors, record).

    A record has `prompt`, `answer` ("" for a task with many right answers) and `entry`, the row as
    reasoning-gym made it.

    Args:
      path: `reasoning_gym:TASK` or `reasoning_gym:TASK:size=2000,seed=1`, with any settings of the
        task. Without `size`, reasoning-gym's default of 500 rows.
      split: "train", or another name for rows that the first split does not have: a billion other
        seeds begin there. A `seed` in the path holds for each split.
      named: the path, as error messages name it.

    Raises:
      ValueError: for an unknown task or wrong settings.
      ModuleNotFoundError: without the package reasoning-gym.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ModuleNotFoundError(
            f"{named} needs the package reasoning-gym: pip install reasoning-gym"
        ) from None
    task, _, settings = path.removeprefix(REASONING_GYM).partition(":")
    try:
        given = tomllib.loads(f"settings = {{{settings}}}")["settings"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{named}: write settings as size=2000,seed=1: {error}") from None
    try:
        rows = reasoning_gym.create_dataset(
            task, **{"seed": 0 if split == "train" else _HELD_OUT} | given
        )
    except Exception as error:  # of the task's own checks
        raise ValueError(
            f"{named}: reasoning-gym refuses the task {task!r} with the settings {given}: {error}"
        ) from error
    for number, entry in enumerate(rows):
        answer = entry["answer"]
        record = {"prompt": entry["question"], "answer": "" if answer is None else str(answer)}
        yield f"{path} row {number}", record | {"entry": entry}
