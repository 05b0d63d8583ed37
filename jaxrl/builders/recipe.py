"""Builds the recipe that a config names: its loss and its advantage estimator."""

from jaxrl import losses
from jaxrl.advantages import by_component, is_marked, max_rl, remax, within_group
from jaxrl.config.training import Config
from jaxrl.losses import Need, Recipe


def make_recipe(config: Config) -> Recipe:
    """Builds the recipe of a training run.

    Raises:
      ValueError: as `losses.build`; also for groups of one where the advantage compares a group,
        a KL penalty that the advantage ignores, penalties where it divides by the mean reward, a
        greedy baseline of a server that sleeps, keys of a critic for a recipe without one, and a
        policy loss that reads a critic's values.
    """
    recipe = losses.build(
        config.loss.name,
        config.loss.parameters,
        advantage=config.loss.advantage,
        known={"max_length": config.sampling.max_tokens},
    )
    if config.train.group_size == 1 and is_marked(recipe.advantages, within_group):
        raise ValueError(
            "train.group_size = 1, but the advantage compares the completions of a group; set "
            "train.group_size to 2 or more, or choose another loss.advantage"
        )
    if config.reward.kl and is_marked(recipe.advantages, by_component):
        raise ValueError(
            f"reward.kl = {config.reward.kl:g} would change nothing: the advantage reads the "
            "components of the reward, and the KL penalty is not one; use loss.kl"
        )
    paid = {"kl": config.reward.kl, "overlong_buffer": config.reward.overlong_buffer}
    if recipe.advantages is max_rl and (used := [name for name, value in paid.items() if value]):
        name = used[0]
        raise ValueError(
            f"reward.{name} = {paid[name]:g} can make rewards negative, and max_rl divides by "
            "their mean; leave it out, or choose another loss.advantage"
        )
    if config.sampler.sleep and recipe.advantages is remax:
        raise ValueError(
            "sampler.sleep = true, and the advantage remax asks for greedy completions while the "
            "server sleeps; leave sampler.sleep out, or choose another loss.advantage"
        )
    given = {"path": config.critic.path, "pretrain_steps": config.critic.pretrain_steps}
    if recipe.critic is None and (unused := [name for name, value in given.items() if value]):
        name = unused[0]
        raise ValueError(
            f"critic.{name} = {given[name]!r}, but loss.name = {config.loss.name!r} has no critic; "
            "leave it out, or choose a recipe with one, such as ppo"
        )
    if Need.VALUES in recipe.objective.needs:
        raise ValueError(
            f"loss.name = {config.loss.name!r}: the policy's loss reads a critic's values, which "
            "only the critic's own loss may; return a Recipe with critic=Critic(...)"
        )
    return recipe
