"""What a training run is made of, built once from its config."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.builders import environment
from jaxrl.builders.layout import make_layout
from jaxrl.builders.learner import open_learning
from jaxrl.builders.prompts import load_held_out_prompts, load_training_prompts, sampling_params
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.reward_model import Judge, load_judge
from jaxrl.builders.sampler import open_sampler
from jaxrl.builders.servers import Adapters, Publish
from jaxrl.config.toml_file import flatten
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.core.batch import Rollout, from_json, to_json
from jaxrl.core.hosts import Hosts
from jaxrl.core.precision import Precision
from jaxrl.data.prompts import Prompts, Tokenizer
from jaxrl.environments.episodes.runner import EpisodeRunner
from jaxrl.environments.rewards.scoring import Reward, load_rewards
from jaxrl.environments.tools.schema import Tool, load_tools
from jaxrl.learner.actor_critic import ActorCritic, State, with_new_loss_scale
from jaxrl.learner.policy import Learner
from jaxrl.learner.update import saved, with_saved
from jaxrl.losses import Recipe
from jaxrl.models import huggingface
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.monitoring.ratio.replay import Score
from jaxrl.monitoring.tracking.samples import NoSamples, Samples
from jaxrl.monitoring.tracking.services import open_services
from jaxrl.monitoring.tracking.tracking import Silence, Tracker, open_tracker
from jaxrl.sampling.base import Sampler, SamplingParams
from jaxrl.training import rollbacks
from jaxrl.training.storage.checkpoint import Checkpoints
from jaxrl.training.storage.run_directory import claim, note_start
from sharding.partition import Layout

MODEL, ENVIRONMENT = "model", "environment"  # parts of a reward that are no functions


@dataclasses.dataclass
class Progress:
    """How far a run has come; what a checkpoint holds besides the learner's state.

    Attributes:
      step: rollouts trained on; also the version of the policy that is sampled next.
      position: prompts taken from the data so far.
      initial_accuracy: held-out accuracy before the first step; None if it is not measured.
      accuracy: the latest held-out accuracy.
      pending: answers that wait to be learnt from: those that dynamic sampling left over, and
        those that were sampled ahead.
      running: numbers of prompts that were being answered, to be answered again.
      counts: `buffer.Counts` of a run that samples ahead.
      short_batches: steps in which dynamic sampling did not find enough groups.
      entropy_coefficient: of an adaptive entropy bonus; None until there is one.
      precision: the dtype policy that all of this came from.
    """

    step: int = 0
    position: int = 0
    initial_accuracy: float | None = None
    accuracy: float | None = None
    pending: list[Rollout] = dataclasses.field(default_factory=list)
    running: list[int] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    short_batches: int = 0
    entropy_coefficient: float | None = None
    precision: str | None = None

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return vars(self) | {"pending": [to_json(rollout) for rollout in self.pending]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Progress":
        """The inverse of `to_json`."""
        fields = dict(content)
        fields["pending"] = [from_json(rollout) for rollout in fields.get("pending", ())]
        return cls(**fields)

    def answer_again(self) -> None:
        """Drops the answers that wait. In a run that samples ahead they count as late, and their
        prompts are answered again."""
        groups = {rollout.group for rollout in self.pending}
        self.pending = []
        if self.counts:
            self.counts = self.counts | {"late": self.counts["late"] + len(groups)}
            self.running = sorted({*self.running, *groups})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run. The learner's state is not among them: the loop hands it on."""

    config: Config
    directory: Path
    tokenizer: Tokenizer
    prompts: Prompts
    held_out: Prompts | None
    rewards: Sequence[Reward]
    reward_model: Judge | None
    episode_runner: EpisodeRunner | None  # None if answers have a single turn
    model: Model
    specs: Any  # of the learner's parameters: the model's, or lora.Adapted
    layout: Layout
    recipe: Recipe
    learner: Learner  # compiled; `step` donates the state
    learning_rate: Any  # optimizer step -> learning rate
    critic: ActorCritic | None  # compiled likewise; None unless the recipe has one
    sampler: Sampler
    publish: Publish
    replay: Score | None  # the server's log-probs of given tokens; None without a server
    sampling: SamplingParams  # with the seed of the run; the loop derives one for each step
    # The trainable part before the first step, in precision.compute; None unless the loss or the
    # reward needs it.
    reference: Params | None
    checkpoints: Checkpoints
    tracker: Tracker | Silence
    samples: Samples | NoSamples
    hosts: Hosts

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the parts of the reward: its functions, the reward model, the environment."""
        weights = {term.name: term.weight for term in self.rewards}
        if self.reward_model is not None:
            weights[MODEL] = self.config.reward.model_weight
        if self.episode_runner is not None:
            weights[ENVIRONMENT] = self.config.environment.weight
        return weights


@contextmanager
def open_run(config: Config) -> Iterator[tuple[Run, State, Progress]]:
    """Builds a run, or goes on with the one that its directory holds.

    Yields:
      (the parts, the state of what learns, how far it has come).

    Raises:
      ResumeError: if the directory holds a run with another config.
      ValueError: for a config, a model or data that cannot be used; the message names the key.
    """
    directory, hosts = Path(config.run_dir), Hosts()
    config = hosts.led(lambda: rollbacks.settle(directory, config))
    recipe, policy = make_recipe(config), precision.parse(config.precision)
    layout = make_layout(config.mesh)
    material = _read_material(config, hosts=hosts)
    learning, state = open_learning(config, recipe, layout=layout)
    tokenizer, vocab_size = material.tokenizer, learning.model.config.vocab_size
    episode_runner = environment.make_episode_runner(
        config, tokenizer, material.tools, vocab_size=vocab_size
    )
    judge = None
    if config.reward.model is not None:
        judge = hosts.together(load_judge(config, config.reward.model, tokenizer, layout=layout))

    otherwise = hosts.led(lambda: claim(directory, config))
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep=config.checkpoints_kept,
        keep_best=config.checkpoint.keep_best,
    )
    state, progress = restored(checkpoints, state, policy=policy)
    with (
        _opened_tracker(config, directory, progress, hosts=hosts, layout=layout) as tracker,
        open_sampler(
            config,
            learning.model,
            params=state.policy.params,
            version=progress.step,
            policy=policy,
            layout=layout,
            directory=directory,
            note=tracker.note,
            hosts=hosts,
            adapters=Adapters(learning.specs, 2 + config.rollouts.max_staleness)
            if config.lora.publish == "adapters"
            else None,
            record_experts=config.train.replay_routing,
            answers=config.answers_at_once,
        ) as serving,
    ):
        run = Run(
            config=config,
            directory=directory,
            tokenizer=tokenizer,
            prompts=material.prompts,
            held_out=material.held_out,
            rewards=material.rewards,
            reward_model=judge,
            episode_runner=episode_runner,
            model=learning.model,
            specs=learning.specs,
            layout=layout,
            recipe=recipe,
            learner=learning.learner,
            learning_rate=learning.learning_rate,
            critic=learning.critic,
            sampler=serving.sampler,
            publish=serving.publish,
            replay=serving.score,
            sampling=sampling_params(
                config.sampling, config.model.path, tokenizer, seed=config.seed
            ),
            reference=learning.reference,
            checkpoints=checkpoints,
            tracker=tracker,
            samples=Samples(
                directory / "samples.jsonl",
                config.samples,
                tokenizer=tokenizer,
                start_step=progress.step,
            )
            if hosts.leads
            else NoSamples(),
            hosts=hosts,
        )
        for line in filter(None, (*_notes(run), otherwise, learning.attention)):
            tracker.note(line)
        try:
            yield run, state, progress
        finally:
            checkpoints.close()


class _Material(NamedTuple):
    """What a run learns from: its prompts, and who judges the answers."""

    tokenizer: Tokenizer
    tools: Mapping[str, Tool]
    prompts: Prompts
    held_out: Prompts | None
    rewards: Sequence[Reward]


def _read_material(config: Config, *, hosts: Hosts) -> _Material:
    tokenizer = huggingface.load_tokenizer(config.model.path)
    tools = load_tools(config.environment.tools, corpus=config.environment.corpus)
    prompts, held_out = Prompts((), 0), None
    if hosts.leads:
        prompts = load_training_prompts(config.data, tokenizer, tools=tools)
        held_out = load_held_out_prompts(config.data, tokenizer, tools=tools)
    rewards = load_rewards(config.reward.path, config.reward.weights, timeout=config.reward.timeout)
    return _Material(tokenizer, tools, prompts, held_out, rewards)


def restored(
    checkpoints: Checkpoints, state: State, *, policy: Precision
) -> tuple[State, Progress]:
    """What the last checkpoint holds, or `state` and no progress where there is none."""
    progress = Progress()
    if (step := checkpoints.latest_step()) is not None:
        found = checkpoints.restore(step, saved(state.policy), critic=state.critic)
        state = State(with_saved(state.policy, found.state), found.critic)
        progress = Progress.from_json(found.host)
        state = carried_over(state, progress, policy=policy)
    progress.precision = str(policy)
    return state, progress


def carried_over(state: State, progress: Progress, *, policy: Precision) -> State:
    """What a checkpoint holds, for a run that goes on in another precision than it was written in:
    the loss scale begins anew, and answers that wait are dropped if the sampler now computes
    otherwise than it did for them."""
    if progress.precision is None or progress.precision == str(policy):
        return state
    before = precision.parse(progress.precision)
    if (before.wire, before.sampler) != (policy.wire, policy.sampler):
        progress.answer_again()
    return with_new_loss_scale(state, policy)


@contextmanager
def _opened_tracker(
    config: Config, directory: Path, progress: Progress, *, hosts: Hosts, layout: Layout
) -> Iterator[Tracker | Silence]:
    """Where the metrics of a run go; only process 0 writes any."""
    if not hosts.leads:
        yield Silence()
        return
    note_start(directory, step=progress.step, devices=list(layout.mesh.devices.flat))
    with open_tracker(
        directory,
        start_step=progress.step,
        total_steps=config.train.steps,
        services=lambda note: open_services(
            config.tracking, directory, resolved=flatten(config), note=note
        ),
    ) as tracker:
        yield tracker


def _notes(run: Run) -> Iterator[str]:
    """What a user should know of a run before its first step."""
    config = run.config
    for made in rollbacks.read(run.directory) if run.hosts.leads else ():
        yield f"rolled back after step {made.at} to {made.to}, with {made.in_words}"
    if (advice := precision.disagreement(precision.parse(config.precision))) is not None:
        yield f"learner and sampler compute different policies: {advice}"
    for name, those in (("data.path", run.prompts), ("data.eval_path", run.held_out)):
        if those is not None and those.too_long:
            yield (
                f"{name}: {those.too_long} prompts have more than data.max_prompt_tokens = "
                f"{config.data.max_prompt_tokens} tokens and are left out"
            )
