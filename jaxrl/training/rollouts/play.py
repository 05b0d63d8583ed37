"""Groups of rollouts that the workers of a fleet play: the worker's side."""

import dataclasses
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxrl.builders import environment
from jaxrl.builders.prompts import training_params
from jaxrl.builders.sampler import Connection
from jaxrl.builders.task import load_task
from jaxrl.builders.trial import try_task
from jaxrl.config.training import Config
from jaxrl.data import Example, Prompts
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import Completion, NullSampler, Sampler, SamplingParams, Turn, VllmSampler
from jaxrl.training.rollouts.generate import RolloutSource, generate
from jaxrl.training.rollouts.groups import Group, Played, Servers
from jaxrl.training.rollouts.score import score_rollouts


class Setup(NamedTuple):
    """The facts from which a worker builds what plays the groups of a run."""

    config: Config
    connection: Connection
    weights: Mapping[str, float]  # of the parts of the reward


def play(setup: bytes, servers: Servers, group: Group) -> Played:
    """Plays a group, and scores it if asked; raises as the sampler, and ValueError as `load_task`
    and `make_episode_runner`. `setup` is a pickled `Setup`."""
    player = _player(setup)
    player.use(servers)
    notes = list[str]()
    source = player.source._replace(note=notes.append, sampler=_At(player.sampler, group.index))
    examples = {group.number: group.example}
    params = dataclasses.replace(group.params, stop_texts=source.params.stop_texts)
    found = generate(source, examples, params=params, group_size=group.size)
    rollouts = [rollout for _, rollout in sorted(found, key=lambda one: one.index)]
    if group.scored:
        rollouts = score_rollouts(source, rollouts, examples=examples)
    return Played(rollouts, notes)


def try_in_worker(config: Config, example: Example) -> list[str]:
    """Tries a run's rewards and environment on a row; returns and raises as `try_task`."""
    source = _source(config)
    task, rewards = source.task, [*source.task.rewards]
    task = task._replace(prompts=Prompts([example], 0))
    if task.judge is not None:
        rewards.append(task.judge)
    runner = source.episode_runner
    return try_task(config, task, runner, rewards=rewards, params=source.params)


class _Player:
    """The sampler, environment and rewards of a run."""

    def __init__(self, setup: Setup) -> None:
        self.sampler: VllmSampler = setup.connection.open(
            first=os.getpid(), max_requests=setup.config.sampler.max_requests
        )
        source = _source(setup.config)
        self.source = source._replace(task=source.task._replace(weights=setup.weights))
        self._lock, self._number = threading.Lock(), 0

    def use(self, servers: Servers) -> None:
        """Samples from these servers, unless it knows of a later change."""
        with self._lock:
            if servers.number > self._number:
                self._number = servers.number
                self.sampler.limit(servers.requests)
                self.sampler.use_version(**servers.used)


_lock = threading.Lock()
_last: dict[bytes, _Player] = {}


def _player(setup: bytes) -> _Player:
    """Returns the player of a setup. The one before, of a run that was started again, is closed."""
    with _lock:
        if setup not in _last:
            for player in _last.values():
                player.sampler.close()
            _last.clear()
            _last[setup] = _Player(pickle.loads(setup))
        return _last[setup]


def _source(config: Config) -> RolloutSource:
    policy = Checkpoint(config.model.path)
    task = load_task(config, policy, splits=())
    return RolloutSource(
        config=config,
        task=task,
        sampler=NullSampler(),
        params=training_params(config.sampling, policy, seed=config.seed),
        episode_runner=environment.make_episode_runner(
            config, task.tokenizer, task.tools, vocab_size=policy.config.vocab_size
        ),
        reward_model=None,
        teacher=None,
        note=lambda text: None,
    )


class _At(Sampler):
    """A sampler of the prompts from a place on in a larger request."""

    def __init__(self, sampler: Sampler, index: int) -> None:
        self._sampler, self._index = sampler, index

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._sampler.version

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`."""
        index = self._index
        placed = [turn._replace(prompt_index=turn.prompt_index + index) for turn in turns]
        for one in self._sampler.sample_turns(placed, params):
            yield one._replace(prompt_index=one.prompt_index - index)

    def close(self) -> None:
        """Does nothing: other groups use the same sampler."""
