"""The data that `jaxrl eval` measures, and what samples and scores completions of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from jaxrl.builders.environment import make_episode_runner
from jaxrl.builders.policy import open_policy
from jaxrl.builders.prompts import sampling_params
from jaxrl.builders.sampler import SamplerNeeds
from jaxrl.builders.task import TaskData, load_task
from jaxrl.config.training import Config
from jaxrl.data import Prompts
from jaxrl.huggingface import Checkpoint
from jaxrl.training.rollouts.generate import RolloutSource


class DataSet(NamedTuple):
    """Prompts of one path, with what scores their completions."""

    path: str
    config: Config
    checkpoint: Checkpoint  # the policy
    task: TaskData
    prompts: Prompts


def load_data(config: Config, checkpoint: Checkpoint, *, path: str, held_out: bool) -> DataSet:
    """Loads prompts for a policy as `jaxrl train` does, in place of data.eval_path if they are
    `held_out`, else of data.path; raises as `load_task`."""
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
    """Opens the policy with its sampler and environment; raises as `open_policy` and
    `make_episode_runner`. At most so many prompts are asked for at once, with so many samples of
    each."""
    config, checkpoint, task = data.config, data.checkpoint, data.task
    runner = make_episode_runner(
        config, task.tokenizer, task.tools, vocab_size=checkpoint.config.vocab_size
    )
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
            params=sampling_params(config.sampling, checkpoint, seed=config.seed),
            episode_runner=runner,
            reward_model=None,
            teacher=None,
            note=note,
        )
