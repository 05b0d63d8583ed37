"""Builds the recipe that a config names: the loss and the advantages."""

from jaxrl import losses
from jaxrl.advantages import compares_group, reads_components
from jaxrl.config.training import Config
from jaxrl.losses import Need, Recipe


def make_recipe(config: Config) -> Recipe:
    """The algorithm of a training run.

    Raises:
      ValueError: as `losses.build`, for one answer to each prompt where the advantage compares
        answers to one prompt, for a penalty that the advantage would not see, and for a policy's
        loss that reads values.
    """
    recipe = losses.build(
        config.loss.name,
        config.loss.parameters,
        advantage=config.loss.advantage,
        known={"max_length": config.sampling.max_tokens},
    )
    if config.train.group_size == 1 and compares_group(recipe.advantages):
        raise ValueError(
            "train.group_size = 1: the advantage compares the answers of a group, and there is "
            "only one; set train.group_size to 2 or more, or choose another loss.advantage"
        )
    if config.reward.kl and reads_components(recipe.advantages):
        raise ValueError(
            f"reward.kl = {config.reward.kl:g}: the advantage reads the components of the reward, "
            "and this is none of them, so it would change nothing; use loss.kl"
        )
    if Need.VALUES in recipe.objective.needs:
        raise ValueError(
            f"loss.name = {config.loss.name!r}: the policy's loss reads a critic's values, which "
            "are there for the critic's own loss; return a Recipe with critic=Critic(...)"
        )
    return recipe
