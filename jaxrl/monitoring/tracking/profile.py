"""A trace of some steps of a run, for Perfetto and XProf."""

from pathlib import Path
from types import TracebackType
from typing import Self

import jax


def out_of_reach(steps: tuple[int, int] | None, *, done: int, total: int) -> str | None:
    """Why none of the steps will be traced, if that is so.

    Args:
      steps: first and last, counted from 1; None if no trace is asked for.
      done: that the run has taken.
      total: of the whole run.
    """
    if steps is None or max(steps[0], done + 1) <= min(steps[1], total):
        return None
    return (
        f"train.profile_steps = {list(steps)}: nothing is traced now, as the run has done "
        f"{done} of {total} steps; give steps that are to come, or another run_dir"
    )


class Profile:
    """Traces the steps `first` to `last`, counted from 1; nothing if `steps` is None.

    The trace lies in `directory/plugins/profile/`: `perfetto_trace.json.gz` opens in
    https://ui.perfetto.dev, the directory in XProf and in TensorBoard's profile plugin.
    """

    def __init__(self, directory: Path, *, steps: tuple[int, int] | None) -> None:
        self._directory, self._steps, self._running = directory, steps, False

    def __enter__(self) -> Self:
        return self

    def before(self, step: int) -> None:
        """Called before each step: begins and ends the trace where it is due. A run that goes on
        behind `first` has the rest traced."""
        if self._steps is None:
            return
        first, last = self._steps
        if not self._running and first <= step <= last:
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._running = True
        elif step > last:
            self._end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
