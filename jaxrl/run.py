"""What a training run is made of, built once from its config."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import agents, parts, precision
from jaxrl.actor_critic import ActorCritic, State, with_new_loss_scale
from jaxrl.batch import Rollout, from_json, to_json
from jaxrl.checkpoint import Checkpoints
from jaxrl.config.toml_file import flatten
from jaxrl.config.training import Config
from jaxrl.critics import open_critic
from jaxrl.data import Prompts, Tokenizer
from jaxrl.diagnostics.replay import Score
from jaxrl.environments.play import Arena
from jaxrl.environments.reward_model import RewardModel, check_vocabulary, make_scores, rate
from jaxrl.environments.scoring import Reward, load_rewards
from jaxrl.environments.tools import load_tools
from jaxrl.hosts import Hosts
from jaxrl.learner import Learner
from jaxrl.losses import Need, Recipe
from jaxrl.models import huggingface, lora
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.precision import Precision
from jaxrl.run_directory import claim, note_start
from jaxrl.samplers import Adapters, Publish, open_sampler
from jaxrl.sampling.base import Sampler, SamplingParams
from jaxrl.update import saved, with_saved
from jaxrl.watch import rollbacks
from jaxrl.watch.samples import NoSamples, Samples
from jaxrl.watch.services import open_services
from jaxrl.watch.tracking import Silence, Tracker, open_tracker
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
    reward_model: Callable[[Sequence[Rollout]], np.ndarray] | None  # rollouts -> f64[N]
    arena: Arena | None  # None if answers have a single turn
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
        if self.arena is not None:
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
    recipe = parts.make_recipe(config)
    policy = precision.parse(config.precision)
    layout = parts.make_layout(config.mesh)
    tokenizer = huggingface.load_tokenizer(config.model.path)
    tools = load_tools(config.environment.tools, corpus=config.environment.corpus)
    prompts, held_out = Prompts((), 0), None
    if hosts.leads:
        prompts = parts.load_training_prompts(config.data, tokenizer, tools=tools)
        held_out = parts.load_held_out_prompts(config.data, tokenizer, tools=tools)
    rewards = load_rewards(config.reward.path, config.reward.weights, timeout=config.reward.timeout)
    attention = parts.attention_note(
        config.train.attention,
        config=huggingface.load_config(config.model.path),
        layout=layout,
        policy=policy,
        length=config.row_length,
    )
    model, params, specs = parts.load_trained(config, layout=layout)
    arena = agents.make_arena(config, tokenizer, tools, vocab_size=model.config.vocab_size)
    reward_model = None
    if config.reward.model is not None:
        judge = load_reward_model(config, config.reward.model, tokenizer, layout=layout)
        reward_model = hosts.together(functools.partial(rate, judge))
    optimizer = parts.make_optimizer(
        config.optimizer, total_steps=config.optimizer_steps, specs=lora.trainable(specs)
    )
    pure = parts.make_learner(
        config, model, objective=recipe.objective, optimizer=optimizer, layout=layout
    )
    state_shardings = parts.state_shardings(
        config.optimizer, pure.init, params, layout=layout, specs=lora.declared(specs)
    )
    reference = None
    if Need.REFERENCE in recipe.objective.needs or config.reward.kl:
        trained = lora.trainable(params)
        reference = jax.jit(precision.cast, static_argnums=1)(trained, policy.compute)

    hosts.led(lambda: claim(directory, config))
    checkpoints = Checkpoints(
        directory / "checkpoints",
        keep=config.checkpoints_kept,
        keep_best=config.checkpoint.keep_best,
    )
    init = jax.jit(pure.init, donate_argnums=0, out_shardings=state_shardings)
    state, critic = State(init(params)), None
    if recipe.critic is not None:
        critic, judge = open_critic(
            config, recipe, learner=pure, model=model, shardings=state_shardings, layout=layout
        )
        state = state._replace(critic=judge)
    progress = Progress()
    if (step := checkpoints.latest_step()) is not None:
        restored = checkpoints.restore(step, saved(state.policy), critic=state.critic)
        state = State(with_saved(state.policy, restored.state), restored.critic)
        progress = Progress.from_json(restored.host)
        state = carried_over(state, progress, policy=policy)
    progress.precision = str(policy)
    if hosts.leads:
        note_start(directory, step=progress.step, devices=list(layout.mesh.devices.flat))
    with (
        open_tracker(
            directory,
            start_step=progress.step,
            total_steps=config.train.steps,
            services=lambda note: open_services(
                config.tracking, directory, resolved=flatten(config), note=note
            ),
        )
        if hosts.leads
        else nullcontext(Silence()) as tracker,
        open_sampler(
            config,
            model,
            params=state.policy.params,
            version=progress.step,
            policy=policy,
            layout=layout,
            directory=directory,
            note=tracker.note,
            hosts=hosts,
            adapters=Adapters(specs, 2 + config.rollouts.max_staleness)
            if config.lora.publish == "adapters"
            else None,
            record_experts=config.train.replay_routing,
        ) as serving,
    ):
        run = Run(
            config=config,
            directory=directory,
            tokenizer=tokenizer,
            prompts=prompts,
            held_out=held_out,
            rewards=rewards,
            reward_model=reward_model,
            arena=arena,
            model=model,
            specs=specs,
            layout=layout,
            recipe=recipe,
            learner=Learner(
                init=pure.init,
                score=jax.jit(pure.score),
                shadow=jax.jit(pure.shadow),
                step=jax.jit(pure.step, donate_argnums=0, out_shardings=(state_shardings, None)),
            ),
            learning_rate=optimizer.learning_rate,
            critic=critic,
            sampler=serving.sampler,
            publish=serving.publish,
            replay=serving.score,
            sampling=parts.sampling_params(
                config.sampling, config.model.path, tokenizer, seed=config.seed
            ),
            reference=reference,
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
        for made in rollbacks.read(directory) if hosts.leads else ():
            tracker.note(f"rolled back after step {made.at} to {made.to}, with {made.in_words}")
        tracker.note(attention)
        if (advice := precision.disagreement(policy)) is not None:
            if config.strict_precision:
                raise ValueError(f"{advice}; strict_precision = true makes this an error")
            tracker.note(f"learner and sampler compute different policies: {advice}")
        for name, those in (("data.path", prompts), ("data.eval_path", held_out)):
            if those is not None and those.too_long:
                tracker.note(
                    f"{name}: {those.too_long} prompts have more than data.max_prompt_tokens = "
                    f"{config.data.max_prompt_tokens} tokens and are left out"
                )
        try:
            yield run, state, progress
        finally:
            checkpoints.close()


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


def load_reward_model(
    config: Config, path: str, tokenizer: Tokenizer, *, layout: Layout
) -> RewardModel:
    """The reward model of a run, on the learner's devices, in `precision.compute`.

    Args:
      config: of the run; rows and microbatches are those of its learner.
      path: the reward model's directory.
      tokenizer: the policy's.
      layout: of the learner.

    Raises:
      ValueError: if it is no reward model, or its token ids mean something else; the message says
        what differs.
    """
    if not huggingface.load_config(path).scored:
        raise ValueError(
            f"reward.model = {path!r} is a language model, which scores nothing; make a reward "
            "model of it with jaxrl reward-model"
        )
    policy = precision.parse(config.precision)
    model, params = parts.load_scorer(path, layout=layout, dtype=policy.compute)
    check_vocabulary(
        path,
        own=huggingface.load_tokenizer(path),
        policy=tokenizer,
        vocab_size=model.config.vocab_size,
    )
    scores = make_scores(
        model,
        precision=policy,
        rows_per_microbatch=config.microbatch_rows,
        param_shardings=layout.tree(model.specs) if layout.mesh.size > 1 else None,
    )
    return RewardModel(
        params=params,
        scores=jax.jit(scores),
        sharding=layout.batch(("batch", "length")),
        row_length=config.row_length,
        rows_per_microbatch=config.microbatch_rows,
    )
