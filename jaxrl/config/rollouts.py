"""The table of a config that says whether sampler and learner take turns or work at once."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from jaxrl.config.tables import Section

Order = Literal["begun", "finished"]


class RolloutsConfig(Section):
    """Sampling while the learner trains."""

    max_staleness: NonNegativeInt = 0
    """How many versions the policy that drew an answer may be behind the one that learns from it. 0
    samples and learns in turn, as a function of the seed; above 0 both work at the same time, and
    what is learnt from depends on who was faster."""

    order: Order = "begun"
    """Groups are learnt as they were `begun`, where the learner waits for a long answer and none
    gets too old; or as they are `finished`, where it does not wait, and a group that got too old
    meanwhile is dropped and counted, which favours short answers."""

    max_seconds: PositiveFloat | None = None
    """Groups that have waited longer for the learner are dropped and counted."""
