"""Profiler traces of some steps, for Perfetto and XProf."""

from contextlib import ExitStack
from pathlib import Path

import jax


def explain_no_trace(steps: tuple[int, int] | None, *, done: int, total: int) -> str | None:
    """Explains why a run will trace none of the requested steps (first and last, from 1), after
    `done` of its `total` steps; None if it will, or none were requested."""
    if steps is None or max(steps[0], done + 1) <= min(steps[1], total):
        return None
    return (
        f"train.profile_steps = {list(steps)}: nothing to trace, the run has done {done} of "
        f"{total} steps; choose later steps or another run_dir"
    )


class Profile(ExitStack):
    """Traces the steps `first` to `last`, counted from 1; a no-op if `steps` is None.

    The trace is written to `directory/plugins/profile/`. `perfetto_trace.json.gz` opens in
    https://ui.perfetto.dev, the directory in XProf and TensorBoard's profile plugin.
    """

    def __init__(self, directory: Path, *, steps: tuple[int, int] | None) -> None:
        super().__init__()
        self._directory, self._steps, self._running = directory, steps, False

    def before(self, step: int) -> None:
        """Begins or ends the trace if due; call it before each step.

        A run that resumes after `first` traces the remaining steps.
        """
        if self._steps is None:
            return
        first, last = self._steps
        if not self._running and first <= step <= last:
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self.callback(jax.profiler.stop_trace)
            self._running = True
        elif step > last:
            self.close()
