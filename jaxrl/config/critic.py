"""The `[critic]` table of a config."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from jaxrl.config.section import Section


class CriticConfig(Section):
    """The critic of recipes that use one (`ppo`); mini-batches and [optimizer] are the policy's."""

    trunk: Literal["own", "shared"] = "own"
    """`own`: a separate network. `shared`: a value head on the policy's network, which the critic's
    loss then trains as well; it halves memory and compute, but one network serves two losses."""

    path: str | None = None
    """Checkpoint that a separate critic starts from: a reward model, or a language model whose head
    is replaced by one that outputs 0. Its tokenizer must be the policy's. model.path if absent."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic, or of a value head; the schedule is optimizer.schedule over
    the whole run, pretrain_steps included."""

    pretrain_steps: NonNegativeInt = 0
    """Steps at the start of the run that train only the critic (VC-PPO) or the value head."""

    def _contradictions(self) -> Iterator[str]:
        if self.trunk == "shared" and self.path is not None:
            yield (
                f"critic.path = {self.path!r} and critic.trunk = 'shared', whose trunk is the "
                "policy's and whose head starts at 0; leave critic.path out"
            )
