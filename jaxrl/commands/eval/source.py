"""Data sets of `jaxrl eval`, and the source of completions for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from jaxrl.builders.environment import make_episode_runner
from jaxrl.builders.policy import open_policy
from jaxrl.builders.prompts import rendering, training_params
from jaxrl.builders.sampler import SamplerNeeds
from jaxrl.builders.task import TaskData, load_task
from jaxrl.builders.trial import try_task
from jaxrl.config.training import Config
from jaxrl.data import Prompts, end_note
from jaxrl.huggingface import Checkpoint
from jaxrl.training.rollouts.generate import RolloutSource


class DataSet(NamedTuple):
    """Prompts of one path, with their rewards or environment."""

    path: str
    config: Config
    checkpoint: Checkpoint  # the policy
    task: TaskData
    prompts: Prompts


def load_data(config: Config, checkpoint: Checkpoint, *, path: str, held_out: bool) -> DataSet:
    """Loads prompts from `path` as `jaxrl train` loads data.eval_path, or data.path if they are not
    `held_out`; raises as `load_task`."""
    key, split = ("eval_path", "test") if held_out else ("path", "train")
    data = config.data.model_copy(update={key: path})
    task = load_task(config.model_copy(update={"data": data}), checkpoint, splits=(split,))
    prompts = task.held_out if held_out else task.prompts
    assert prompts is not None
    return DataSet(path, config, checkpoint, task, prompts)


@contextmanager
def open_source(
    data: DataSet, *, prompts: int, samples: int, note: Callable[[str], None]
) -> Iterator[RolloutSource]:
    """Opens the policy with its sampler and environment, for requests of at most `prompts` prompts
    with `samples` completions each, after a trial of the reward; raises as `open_policy`,
    `make_episode_runner` and `try_task`."""
    config, checkpoint, task = data.config, data.checkpoint, data.task
    if (end := end_note(task.tokenizer, rendering(config.data))) is not None:
        note(end)
    runner = make_episode_runner(
        config, task.tokenizer, task.tools, vocab_size=checkpoint.config.vocab_size
    )
    params = training_params(config.sampling, checkpoint, seed=config.seed)
    for line in try_task(config, task, runner, rewards=task.rewards[:1], params=params):
        note(line)
    needs = SamplerNeeds(
        config.longest_sequence,
        config.sampling.max_batch,
        completions=min(config.sampler.max_requests, prompts) * samples,
    )
    with open_policy(
        checkpoint,
        config.sampler,
        mesh=config.mesh,
        precision=config.precision,
        needs=needs,
        note=note,
    ) as sampler:
        yield RolloutSource(
            config=config,
            task=task,
            sampler=sampler,
            params=params,
            episode_runner=runner,
            reward_model=None,
            teacher=None,
            note=note,
        )
