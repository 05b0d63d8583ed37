"""Opens the profiler of a run."""

from jaxrl.config.training import Config
from jaxrl.core.hosts import Hosts
from jaxrl.monitoring.tracking.profile import Profile, explain_no_trace
from jaxrl.training.storage.records import Records


def open_profile(config: Config, records: Records, *, done: int, hosts: Hosts) -> Profile:
    """Returns the profiler of `train.profile_steps`, which traces process 0; warns if the run is
    past these steps."""
    steps = config.train.profile_steps
    if (note := explain_no_trace(steps, done=done, total=config.train.steps)) is not None:
        records.tracker.note(note)
    return Profile(records.directory / "profile", steps=steps if hosts.leads else None)
