"""Opens a run: builds its parts from the config and restores its last checkpoint."""

import functools
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import NamedTuple

from jaxrl.builders import environment
from jaxrl.builders.layout import make_layout
from jaxrl.builders.learner import Learning, anchor_note, open_learning
from jaxrl.builders.model import ModelFiles, find_models
from jaxrl.builders.prompts import rendering, training_params
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.reference import connect_reference
from jaxrl.builders.reward_model import RewardModel, load_reward_model
from jaxrl.builders.same_files import check_same_functions
from jaxrl.builders.sampler import SamplerNeeds, Serving, open_sampler
from jaxrl.builders.served_model import connect_reward_model
from jaxrl.builders.task import MODEL, TaskData, load_task, plays_in_workers
from jaxrl.builders.teacher import check_teacher, names_teacher, open_teacher
from jaxrl.builders.trial import first_example, try_task
from jaxrl.builders.weight_sync import Adapters, Listed, Publish, WeightRoute
from jaxrl.config.bucket import local_directory
from jaxrl.config.toml_file import flatten
from jaxrl.config.training import Config
from jaxrl.core import Hosts, disagreement, flags_note
from jaxrl.data import end_note, marked_text, one_line
from jaxrl.diagnostics import Score
from jaxrl.environments import EpisodeRunner
from jaxrl.fleet.addresses import read_addresses
from jaxrl.fleet.membership import membership
from jaxrl.fleet.workers import Died, Workers, fleet_workers
from jaxrl.learner import Checkpoints, State
from jaxrl.sampling import SamplingParams, VllmSampler
from jaxrl.sharding import Layout
from jaxrl.tracking.samples import Samples
from jaxrl.tracking.services import open_services
from jaxrl.tracking.tracker import NullTracker, Tracker, gap, incomplete_logs
from jaxrl.training import rollbacks
from jaxrl.training.certificate import check_certificate
from jaxrl.training.first_lines import first_lines
from jaxrl.training.fork import Fork, find_fork
from jaxrl.training.inputs import (
    OTHER_HELD_OUT,
    Inputs,
    compare_inputs,
    held_out_digest,
    run_inputs,
    write_inputs,
)
from jaxrl.training.judge import Judge
from jaxrl.training.progress import Progress
from jaxrl.training.resume import restore
from jaxrl.training.rollouts.collect import RolloutSource, prompts_at
from jaxrl.training.rollouts.groups import GroupWorkers
from jaxrl.training.rollouts.play import Setup, play, try_in_worker
from jaxrl.training.run_directory import check_config, compare_config, open_run_tracker


class Run(NamedTuple):
    """The parts of a run, except the learner's state and the progress."""

    config: Config  # of the run, with the changes of its rollbacks
    hosts: Hosts  # the processes of the run
    source: RolloutSource  # samples and scores rollouts of prompts
    models: ModelFiles  # the checkpoints that it started from
    learning: Learning  # the compiled learner, and its critic if the recipe has one
    publish: Publish  # sends weights to the sampler
    sleep: Callable[[], None]  # gives the sampler's memory back until the next publish
    score: Score | None  # the server's log-probs of given tokens; None without a server
    samples: Samples | None  # writes rollouts for people to read; None on processes other than 0
    judge: Judge | None  # compares its scores with rewards; None as `samples`, or without one
    checkpoints: Checkpoints  # in the run directory
    # Takes metrics and notes; a NullTracker on processes other than 0.
    tracker: Tracker | NullTracker


@contextmanager
def open_run(config: Config, *, fork: str | None = None) -> Iterator[tuple[Run, State, Progress]]:
    """Builds a run, resuming the one in its directory. Without one, starts from the checkpoint
    `fork`, written RUN or RUN@STEP.

    Yields:
      (the parts, the learner's state, the progress).

    Raises:
      ResumeError: for a run there with another config or inputs, or a fork that cannot be read.
      ValueError: for a config, a model or data that cannot be used; the message names the key.
    """
    directory, hosts = local_directory(config.run_dir), Hosts()
    repaired = hosts.on_leader(lambda: incomplete_logs(directory))
    config = hosts.on_leader(lambda: rollbacks.settle(directory, config))
    change = hosts.on_leader(lambda: compare_config(directory, config))  # before the model is read
    start = hosts.on_leader(lambda: find_fork(fork, config))
    loss = {"loss.name": config.loss.name, "loss.advantage": config.loss.advantage}
    check_same_functions(loss, hosts)
    recipe, models = make_recipe(config), find_models(config)
    layout = make_layout(config.mesh, precision=config.precision, apart=config.devices_apart)
    workers, splits = fleet_workers(), ("train", "test") if hosts.leads else ()
    task = load_task(config, models.policy, splits=splits, workers=workers)
    inputs = hosts.on_leader(
        lambda: compare_inputs(directory, run_inputs(config, recipe, task, models))
    )
    episode_runner, params, tried = _try(config, task, models, workers=workers)
    learning, state = open_learning(config, recipe, models=models, layout=layout)
    teaches, task, reward_model = _open_rewards(config, task, models, layout=layout, hosts=hosts)
    hosts.on_leader(lambda: _claim(config, inputs))
    checkpoints = _make_checkpoints(config)
    start = start and start._replace(here=inputs)
    state, progress = _restore(checkpoints, state, config=config, hosts=hosts, fork=start)
    route = WeightRoute(
        learning.model, state.policy.params, progress.step, config.precision, models.policy
    )
    other = OTHER_HELD_OUT if progress.measure_on(held_out_digest(inputs)) else None
    with (
        _open_tracker(config, progress, hosts=hosts, layout=layout, fork=start) as tracker,
        _open_sampler(config, route, learning=learning, note=tracker.note, hosts=hosts) as serving,
        closing(checkpoints),
        open_teacher(config, models, layout=layout, hosts=hosts)
        if teaches
        else nullcontext() as teacher,
        _open_reference(config, models, learning=learning, hosts=hosts) as learning,
    ):
        certified = hosts.on_leader(
            lambda: check_certificate(
                config, serving, models=models, layout=layout, clips=recipe.objective.clips
            )
        )
        source = RolloutSource(
            config=config,
            task=task,
            sampler=serving.sampler,
            params=params,
            episode_runner=episode_runner,
            reward_model=reward_model,
            teacher=teacher,
            note=tracker.note,
            workers=_group_workers(config, serving, workers, weights=task.weights),
        )
        run = Run(
            config=config,
            hosts=hosts,
            source=source,
            models=models,
            learning=learning,
            publish=serving.publish,
            sleep=serving.sleep,
            score=serving.score,
            samples=_open_samples(source, step=progress.step) if hosts.leads else None,
            judge=_open_judge(source, tracker, step=progress.step) if hosts.leads else None,
            checkpoints=checkpoints,
            tracker=tracker,
        )
        lines = (*repaired, _beginning(run, progress, start), *_first_lines(run), *tried)
        notes = _notes(config, task, teaches=teaches, hosts=hosts)
        _tell(run, (*lines, *notes, change, other, certified))
        yield run, state, progress


@contextmanager
def _open_reference(
    config: Config, models: ModelFiles, *, learning: Learning, hosts: Hosts
) -> Iterator[Learning]:
    """Yields the learner with the reference of `reference.server`, if the run has one."""
    if config.reference.server is None:
        yield learning
        return
    with connect_reference(config, models.policy, shape=learning.shape, hosts=hosts) as score:
        yield learning._replace(reference_apart=score)


def _open_rewards(
    config: Config, task: TaskData, models: ModelFiles, *, layout: Layout, hosts: Hosts
) -> tuple[bool, TaskData, RewardModel | None]:
    """Returns whether reward.model is a teacher, the task with the weights of its rewards, and the
    reward model, loaded or on a server; None if the config names none."""
    if names_teacher(config, models, hosts=hosts):  # which is not part of the reward
        check_teacher(config)
        weights = {name: weight for name, weight in task.weights.items() if name != MODEL}
        return True, task._replace(weights=weights), None
    reward_model = None
    if models.scorer is not None:
        reward_model = hosts.on_all(load_reward_model(config, models, layout=layout))
    elif config.reward.model_url and hosts.leads:
        reward_model = connect_reward_model(config, models.policy)
    return False, task, reward_model


def _group_workers(
    config: Config, serving: Serving, workers: Workers | None, *, weights: Mapping[str, float]
) -> GroupWorkers | None:
    """Returns what has groups played by the workers of a fleet; None if this process plays them."""
    connection = serving.connection
    if workers is None or connection is None or not isinstance(serving.sampler, VllmSampler):
        return None
    return GroupWorkers(
        workers,
        play,
        setup=pickle.dumps(Setup(config, connection, dict(weights))),
        sampler=serving.sampler,
        weights=weights,
        max_requests=config.sampler.max_requests,
    )


def _try(
    config: Config, task: TaskData, models: ModelFiles, *, workers: Workers | None
) -> tuple[EpisodeRunner | None, SamplingParams, list[str]]:
    """Makes what plays and samples a run's episodes, and tries it on the first row. Both happen in
    a worker if workers play."""
    if workers is not None and plays_in_workers(config):
        params = training_params(config.sampling, models.policy, seed=config.seed)
        first = first_example(task)
        tried = [] if first is None else workers.submit(try_in_worker, config, first).result()
        if isinstance(tried, Died):
            raise ValueError(f"{tried.text} of rewards or environment on the first row of the data")
        return None, params, tried
    runner = environment.make_episode_runner(
        config, task.tokenizer, task.tools, vocab_size=models.policy.config.vocab_size
    )
    params = training_params(config.sampling, models.policy, seed=config.seed)
    rewards = [*task.rewards, *([task.judge] if task.judge is not None else [])]
    return runner, params, try_task(config, task, runner, rewards=rewards, params=params)


def _beginning(run: Run, progress: Progress, start: Fork | None) -> str | None:
    """Tells which run a fork comes from, or which steps a resumed run's metrics lack."""
    if start is not None:
        return start.note
    return gap(run.tracker.history, step=progress.step) if run.hosts.leads else None


def _claim(config: Config, inputs: Inputs) -> None:
    """Writes a run's config and the digests of its inputs into its directory."""
    check_config(local_directory(config.run_dir), config)
    write_inputs(local_directory(config.run_dir), inputs)


def _make_checkpoints(config: Config) -> Checkpoints:
    return Checkpoints(
        local_directory(config.run_dir) / "checkpoints",
        keep=config.checkpoints_kept,
        keep_best=max(config.checkpoint.keep_best, config.alarms.best_kept),
    )


def _restore(
    checkpoints: Checkpoints, state: State, *, config: Config, hosts: Hosts, fork: Fork | None
) -> tuple[State, Progress]:
    """Reads the last checkpoint as `restore`, with what rollbacks have changed since."""
    state, progress = restore(
        checkpoints, state, precision=config.precision, batch=config.train.train_batch, fork=fork
    )
    made = hosts.on_leader(lambda: rollbacks.read(local_directory(config.run_dir)))
    rollbacks.scale_coefficients(progress.coefficients, made, step=progress.step)
    return state, progress


def _open_sampler(
    config: Config,
    route: WeightRoute,
    *,
    learning: Learning,
    note: Callable[[str], None],
    hosts: Hosts,
) -> AbstractContextManager[Serving]:
    return open_sampler(
        config.sampler,
        route,
        layout=learning.layout,
        needs=_sampler_needs(config, learning),
        directory=local_directory(config.run_dir),
        note=note,
        hosts=hosts,
    )


def _sampler_needs(config: Config, learning: Learning) -> SamplerNeeds:
    adapters = None
    if config.lora.publish == "adapters":
        adapters = Adapters(learning.specs, 2 + config.rollouts.max_staleness)
    return SamplerNeeds(
        config.longest_sequence,
        config.sampling.max_batch,
        adapters=adapters,
        record_experts=config.train.replay_routing,
        record_kept=config.sampling.truncated,
        completions=config.concurrent_completions,
        servers=_listed(config),
    )


def _listed(config: Config) -> Listed:
    """Returns what tells the servers of this process's fleet."""
    if not config.fleet.servers or membership() is None:
        return lambda: None
    return functools.partial(read_addresses, local_directory(config.run_dir))


def _open_samples(source: RolloutSource, *, step: int) -> Samples:
    config, task = source.config, source.task
    return Samples(
        local_directory(config.run_dir) / "samples.jsonl",
        tokenizer=task.tokenizer,
        answer=lambda number: prompts_at(source, [number])[number].get("answer"),
        parts=list(task.weights),
        start_step=step,
    )


def _open_judge(
    source: RolloutSource, tracker: Tracker | NullTracker, *, step: int
) -> Judge | None:
    if source.config.judge.path is None:
        return None
    directory = local_directory(source.config.run_dir)
    return Judge(source, directory, history=tracker.history, note=tracker.note, step=step)


def _open_tracker(
    config: Config, progress: Progress, *, hosts: Hosts, layout: Layout, fork: Fork | None
) -> AbstractContextManager[Tracker | NullTracker]:
    return open_run_tracker(
        config,
        step=progress.step,
        hosts=hosts,
        layout=layout,
        origin=None if fork is None else fork.origin,
        services=lambda note: open_services(
            config.tracking, local_directory(config.run_dir), resolved=flatten(config), note=note
        ),
    )


def _tell(run: Run, lines: Iterable[str | None]) -> None:
    """Prints what there is to say before the first step."""
    for line in filter(None, lines):
        run.tracker.note(line)
    for line in filter(None, _details(run)):
        run.tracker.detail(line)


def _first_lines(run: Run) -> list[str]:
    task, learning = run.source.task, run.learning
    return first_lines(
        run.config,
        learning.model,
        specs=learning.specs,
        devices=learning.check_attention(run.config),
        lengths=array("q", (len(one.tokens) for one in task.prompts.examples)),
        held_out=len(task.held_out.examples) if task.held_out is not None else 0,
    )


def _details(run: Run) -> Iterator[str | None]:
    """Yields how a run was set up, for `--verbose`."""
    task, config = run.source.task, run.config
    if examples := task.prompts.examples:
        yield f"the first prompt: {one_line(marked_text(task.tokenizer, examples[0].tokens))}"
    yield end_note(task.tokenizer, rendering(config.data))
    yield anchor_note(run.learning.recipe, updates=config.train.updates_per_rollout)
    yield run.learning.rows_note
    yield flags_note(run.learning.layout.mesh.devices.flat[0])


def _notes(config: Config, task: TaskData, *, teaches: bool, hosts: Hosts) -> Iterator[str]:
    """Yields warnings about a run, shown before its first step."""
    for made in rollbacks.read(local_directory(config.run_dir)) if hosts.leads else ():
        yield f"rolled back after step {made.at} to {made.to}, with {made.in_words}"
    if (advice := disagreement(config.precision)) is not None:
        yield f"learner and sampler compute differently: {advice}"
    if teaches:
        yield (
            f"reward.model = {config.reward.model!r} is a language model: it teaches each token "
            f"with weight {config.reward.model_weight:g}, and is not part of the reward"
        )
    for name, loaded in (("data.path", task.prompts), ("data.eval_path", task.held_out)):
        if loaded is not None and loaded.too_long:
            yield (
                f"{name}: dropped {loaded.too_long} prompts with more than data.max_prompt_tokens "
                f"= {config.data.max_prompt_tokens} tokens"
            )
