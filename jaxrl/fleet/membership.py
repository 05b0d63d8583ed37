"""The fleet that started this process, if one did."""

import json
import os
from typing import NamedTuple

VARIABLE = "JAXRL_FLEET"  # of a learner host, set by the fleet


class Membership(NamedTuple):
    """The facts about its fleet that a learner host knows."""

    address: str  # of the Ray cluster
    namespace: str  # of the fleet's actors
    workers: int

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that tell a process."""
        return {VARIABLE: json.dumps(self)}


def membership() -> Membership | None:
    """Returns this process's fleet; None if no fleet started it."""
    text = os.environ.get(VARIABLE)
    return Membership(*json.loads(text)) if text else None
