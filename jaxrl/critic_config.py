"""The table of a config that says what a critic is made of."""

from pydantic import NonNegativeInt, PositiveFloat

from jaxrl.config_tables import Section


class CriticConfig(Section):
    """The critic of recipes that have one (`ppo`): a network of its own, learnt from the same
    mini-batches as the policy, with the optimizer of [optimizer]."""

    path: str | None = None
    """Checkpoint that the critic begins with: a language model, whose head is replaced by one that
    gives 0, or a reward model. model.path when absent."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of the critic; its schedule is the policy's."""

    pretrain_steps: NonNegativeInt = 0
    """Rollouts at the beginning of the run in which only the critic learns (VC-PPO)."""
