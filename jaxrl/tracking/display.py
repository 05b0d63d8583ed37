"""The live display of a run, and the estimate of its remaining time."""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich import progress
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# Label, name and format of the displayed metrics, in this order; unknown ones are left out.
DISPLAYED = (
    ("reward", "reward", "{:.3f}"),
    ("held-out accuracy", "eval/accuracy", "{:.1%}"),
    ("accuracy", "accuracy", "{:.1%}"),
    ("kept", "kept", "{:,.0f}"),
    ("loss", "loss", "{:z.4f}"),
    ("KL", "kl", "{:.5f}"),
    ("gradient norm", "grad_norm", "{:.3f}"),
    ("completion length", "completion_length", "{:.1f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("workers", "fleet/workers", "{:,.0f}"),
    ("calls that wait for them", "fleet/waiting", "{:,.0f}"),
    ("deaths of workers", "fleet/deaths", "{:,.0f}"),
)

# Metrics that count the failures behind a displayed one.
_FAILED = {"reward": "reward/failed", "held-out accuracy": "eval/failed"}

RECENT_STEPS = 20  # used by the estimate
_COMPILING = "compiling"  # until the first step of this process is done


class ProgressDisplay:
    """A progress bar with the time left and the newest metrics; plain lines without a terminal."""

    def __init__(self, title: str, *, start_step: int, total_steps: int):
        self._console = Console(file=sys.stderr)
        self._metrics: dict[str, float] = {}
        self._total = total_steps
        self._start = start_step
        self._times: list[tuple[int, float]] = []  # at the end of the last steps
        self._printed = -math.inf
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._task = self._bar.add_task(
            title, total=total_steps, completed=start_step, left=_COMPILING
        )
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, text: str) -> None:
        """Prints a line above the display."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Displays the metrics after `step` steps."""
        self._metrics.update(metrics)
        now = time.monotonic()
        # Each step once: an evaluation logs it again. The first, which compiles, starts the clock.
        if step > (self._times[-1][0] if self._times else self._start):
            self._times = [*self._times[-RECENT_STEPS:], (step, now)]
        seconds = seconds_left(self._times, total=self._total)
        left = "" if self._times else _COMPILING
        if seconds is not None:
            left = f"{format_duration(seconds)} left"
        self._bar.update(self._task, completed=step, left=left)
        # A log file gets a line every few seconds, and one at the end.
        if not self._console.is_terminal and (now - self._printed > 5 or step == self._total):
            self._printed = now
            shown = ", ".join(f"{label} {text}" for label, text in self._values())
            self.note(f"step {step}/{self._total}: {shown}{', ' + left if left else ''}")

    def _values(self) -> list[tuple[str, str]]:
        found = []
        for label, name, form in DISPLAYED:
            if (value := self._metrics.get(name)) is not None:
                failed = self._metrics.get(_FAILED.get(label, ""), 0)
                found.append((label, form.format(value) + f" ({failed:.0f} failed)" * (failed > 0)))
        return found

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for label, text in self._values():
            table.add_row(Text(label, style="dim"), text)
        return Group(self._bar, table)


def seconds_left(times: Sequence[tuple[int, float]], *, total: int) -> float | None:
    """Estimates the remaining seconds from the median recent step; None before two steps.

    Args:
      times: (step, seconds at its end); steps may be missing.
      total: steps of the whole run.
    """
    pairs = itertools.pairwise(times[-RECENT_STEPS - 1 :])
    durations = [(b - a) / max(1, after - before) for (before, a), (after, b) in pairs]
    return statistics.median(durations) * (total - times[-1][0]) if durations else None


def format_duration(seconds: float) -> str:
    """Formats seconds as "11:59" or "1:00:00"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
