"""The table of a config that says what a critic is made of."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from jaxrl.config.tables import Section


class CriticConfig(Section):
    """The critic of recipes that have one (`ppo`), learnt from the same mini-batches as the policy,
    with the optimizer of [optimizer]."""

    trunk: Literal["own", "shared"] = "own"
    """`own`: a network of its own. `shared`: a head on the policy's network, which then learns from
    the critic's loss, too; half the memory and computation, and two aims for one trunk."""

    path: str | None = None
    """Checkpoint that a network of its own begins with: a language model, whose head is replaced by
    one that gives 0, or a reward model. model.path when absent."""

    coefficient: PositiveFloat | None = None
    """With a shared trunk, of the critic's loss beside the policy's; 0.1 when absent."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic, with a shared trunk of its head; the schedule is the
    policy's."""

    pretrain_steps: NonNegativeInt = 0
    """Rollouts at the beginning of the run in which only the critic learns (VC-PPO), with a shared
    trunk only its head."""
