"""The `[rollouts]` table of a config."""

from typing import Literal

from pydantic import NonNegativeInt

from jaxrl.config.section import Section

Order = Literal["begun", "finished"]


class RolloutsConfig(Section):
    """Asynchronous training: sampling while the learner trains."""

    max_staleness: NonNegativeInt = 0
    """Maximum number of policy versions between the sampler and the learner. With 0 they take
    turns, and the run is a function of the seed; above 0 they work at the same time, and the
    batches depend on timing."""

    order: Order = "begun"
    """Order in which groups are trained on. `begun`: as their sampling began; the learner waits for
    long completions and none becomes too stale. `finished`: as their sampling finished; the learner
    does not wait, groups that became too stale are dropped and counted, and short completions are
    favoured."""
