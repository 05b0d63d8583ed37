"""The config of a training run: its tables together, and what contradicts what.

`jaxrl.config.toml_file` reads one from TOML and the command line.
"""

import math
from collections.abc import Iterator
from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from jaxrl.config.alarms import AlarmsConfig
from jaxrl.config.critic import CriticConfig
from jaxrl.config.environment import EnvironmentConfig
from jaxrl.config.hosts import HostsConfig
from jaxrl.config.lora import LoraConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.reward import RewardConfig
from jaxrl.config.rollouts import RolloutsConfig
from jaxrl.config.tables import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ProbeConfig,
    RunConfig,
    SamplerConfig,
    SamplingConfig,
    TrainConfig,
)
from jaxrl.config.tracking import SamplesConfig, TrackingConfig
from jaxrl.core import precision


class Config(RunConfig):
    """A reinforcement-learning run."""

    model: ModelConfig
    data: DataConfig
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = Field(default=RewardConfig(), validate_default=True)
    loss: LossConfig = LossConfig()
    sampling: SamplingConfig = SamplingConfig()
    sampler: SamplerConfig = SamplerConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    hosts: HostsConfig = HostsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    probe: ProbeConfig = ProbeConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    samples: SamplesConfig = SamplesConfig()
    tracking: TrackingConfig = TrackingConfig()

    strict_precision: bool = False
    """Make it an error, not a warning, if learner and sampler compute in different dtypes."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.data.max_prompt_tokens + self.sampling.max_tokens

    @property
    def row_length(self) -> int:
        """Tokens in a row of the learner's batch."""
        return self.train.row_length or self.longest_sequence

    @property
    def microbatch_rows(self) -> int:
        """Rows of one forward and backward pass, over all data-parallel shards."""
        per_shard = self.train.microbatch_tokens // self.row_length
        return per_shard * self.mesh.batch_shards

    @property
    def minibatch_answers(self) -> int:
        """The most answers that one optimizer step learns from."""
        return self.train.train_batch * self.train.group_size // self.train.updates_per_rollout

    @property
    def answers_at_once(self) -> int:
        """The most answers that servers are asked for at a time."""
        prompts = self.train.train_batch * (self.rollouts.max_staleness + 1)
        return min(self.sampler.max_requests, prompts) * self.train.group_size

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, which the schedule spans."""
        return self.train.steps * self.train.updates_per_rollout

    @property
    def checkpoints_kept(self) -> int:
        """Newest checkpoints that are kept: where an alarm may roll back, also those that reach
        back over what it looked at."""
        if not self.alarms.rolls_back:
            return self.checkpoint.keep
        back = self.alarms.reach(probe_every=self.probe.every) + self.checkpoint.every
        dues = (every for every in (self.checkpoint.every, self.eval.every) if every)
        return max(self.checkpoint.keep, sum(math.ceil(back / every) for every in dues) + 1)

    @field_validator("reward")
    @classmethod
    def _names_something(cls, value: RewardConfig, info: ValidationInfo) -> RewardConfig:
        environment = info.data.get("environment", EnvironmentConfig())
        if not value.path and value.model is None and environment.name is None:
            raise ValueError("reward.path is missing, and reward.model too: name what answers earn")
        return value

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        found = list(_contradictions(self))
        if found:
            raise ValueError("\n".join(found))
        return self


def _contradictions(c: Config) -> Iterator[str]:
    """One line for each pair of keys that cannot both hold, with the fix."""
    train, answers = c.train, c.train.train_batch * c.train.group_size
    if train.group_size == 1 and train.refill_rounds:
        yield (
            f"train.refill_rounds = {train.refill_rounds} leaves out groups whose answers all earn "
            "the same, and with train.group_size = 1 these are all; set one of the two otherwise"
        )
    if answers % train.updates_per_rollout:
        yield (
            f"train.updates_per_rollout = {train.updates_per_rollout} does not divide the rollout "
            f"of train.train_batch x train.group_size = {train.train_batch} x {train.group_size} = "
            f"{answers} answers; choose a divisor"
        )
    if train.profile_steps is not None and train.profile_steps[0] > train.profile_steps[1]:
        yield f"train.profile_steps = {list(train.profile_steps)}: the first one must come first"
    if c.row_length < c.longest_sequence:
        yield (
            f"train.row_length = {c.row_length} is shorter than data.max_prompt_tokens + "
            f"sampling.max_tokens = {c.longest_sequence}; raise it or leave it out"
        )
    if train.microbatch_tokens < c.row_length:
        yield (
            f"train.microbatch_tokens = {train.microbatch_tokens} does not hold one row of "
            f"{c.row_length} tokens; raise it to a multiple of {c.row_length}"
        )
    if c.row_length % c.mesh.row_shards:
        wanted = math.ceil(c.row_length / c.mesh.row_shards) * c.mesh.row_shards
        yield (
            f"a row of {c.row_length} tokens cannot be cut into {c.mesh.row_shards} parts, as "
            f"mesh.context = {c.mesh.context} and the rules of the mesh say; set train.row_length "
            f"= {wanted}"
        )
    has_environment = c.environment.name is not None
    if c.environment.tools and not has_environment:
        yield (
            f"environment.tools = {list(c.environment.tools)} and nobody who runs them: set "
            "environment.name = 'agent'"
        )
    if c.environment.corpus is not None and "search" not in c.environment.tools:
        yield "environment.corpus is for the tool search; add 'search' to environment.tools"
    if c.reward.weights and len(c.reward.weights) != len(c.reward.path):
        yield (
            f"reward.weights has {len(c.reward.weights)} numbers for {len(c.reward.path)} "
            "functions in reward.path; give one for each, or none"
        )
    if c.data.eval_path is not None and not c.reward.path and not has_environment:
        yield (
            "data.eval_path needs a function in reward.path that says which answers are right; "
            "with reward.weights = [0] it is measured and not learnt"
        )
    if c.critic.trunk == "shared" and c.critic.path is not None:
        yield (
            f"critic.path = {c.critic.path!r} and critic.trunk = 'shared': the trunk is the "
            "policy's, and the head begins with 0; leave critic.path out"
        )
    if c.critic.trunk == "shared" and c.lora.rank:
        yield (
            f"critic.trunk = 'shared' would learn the trunk that lora.rank = {c.lora.rank} keeps "
            "frozen; set critic.trunk = 'own' or lora.rank = 0"
        )
    if c.critic.trunk == "own" and c.critic.coefficient is not None:
        yield (
            f"critic.coefficient = {c.critic.coefficient:g} weighs two losses of one network and "
            "critic.trunk = 'own' has two; set critic.learning_rate instead"
        )
    if c.reward.overlong_buffer > c.sampling.max_tokens:
        yield (
            f"reward.overlong_buffer = {c.reward.overlong_buffer} is more than the "
            f"sampling.max_tokens = {c.sampling.max_tokens} that an answer may have"
        )
    if c.data.system_prompt is not None and c.data.template == "text":
        yield (
            "data.system_prompt needs a chat template and data.template = 'text' has none; "
            "put the text into data.prompt_format or set data.template = 'chat'"
        )
    for key, value, whole in (
        ("top_p", c.sampling.top_p, 1),
        ("top_k", c.sampling.top_k, 0),
        ("min_p", c.sampling.min_p, 0),
    ):
        if value != whole:
            yield (
                f"sampling.{key} = {value:g} leaves out tokens: a sampler then reports log-probs "
                "of what is left and the learner those of the whole distribution, so that ratios, "
                "mismatch/ and probe/ would measure the difference; a training run draws from the "
                "whole one, leave the key out"
            )
    if c.optimizer.warmup_steps >= c.optimizer_steps:
        yield (
            f"optimizer.warmup_steps = {c.optimizer.warmup_steps} leaves nothing of the run's "
            f"{c.optimizer_steps} optimizer steps (train.steps x train.updates_per_rollout)"
        )
    for key, text in (("precision", c.precision), ("alarms.precision", c.alarms.precision)):
        if (
            text is not None
            and precision.parse(text).wire.itemsize == 1
            and (c.sampler.name != "embedded" or c.lora.rank)
        ):
            yield (
                f"{key} = {text!r}: weights in 8 bits are for sampler.name = 'embedded' and "
                "without lora; give wire another dtype"
            )
    if c.lora.publish == "adapters" and c.sampler.name != "vllm":
        yield (
            "lora.publish = 'adapters' needs a server that takes them; set sampler.name = 'vllm', "
            "or lora.publish = 'merged'"
        )
    if c.lora.publish == "adapters" and c.rollouts.order == "finished":
        yield (
            "rollouts.order = 'finished' lets an answer outlive any number of versions, and with "
            "lora.publish = 'adapters' servers keep few; set rollouts.order = 'begun', or "
            "lora.publish = 'merged'"
        )
    if (c.sampler.transport == "directory") != (c.sampler.directory is not None):
        yield (
            f"sampler.transport = {c.sampler.transport!r} and sampler.directory = "
            f"{c.sampler.directory or 'none'!r} do not go together; a directory needs the "
            "transport directory, and that needs a directory"
        )
    if c.sampler.name == "embedded" and c.sampler.url:
        yield "sampler.url names servers and sampler.name = 'embedded' asks none; set it to 'vllm'"
    if c.sampler.name != "embedded" and c.sampler.rules is not None:
        yield f"sampler.rules = {c.sampler.rules!r} is for sampler.name = 'embedded'; leave it out"
    on_mesh = c.sampler.name == "embedded" or c.reward.model is not None
    if c.rollouts.max_staleness and math.prod(c.mesh.sizes.values()) > 1 and on_mesh:
        yield (
            f"rollouts.max_staleness = {c.rollouts.max_staleness} and a mesh of several "
            "devices: two threads that start programs on the same devices wait for each other; let "
            "a server sample (sampler.name = 'vllm', no reward.model), or set it to 0"
        )
    if train.replay_routing and c.sampler.name != "embedded":
        yield (
            f"train.replay_routing needs a sampler that says which experts it used, and "
            f"sampler.name = {c.sampler.name!r} does not; leave it out, or set sampler.name = "
            "'embedded'"
        )
    if train.replay_routing and c.critic.trunk == "shared":
        yield (
            "train.replay_routing and critic.trunk = 'shared': values are computed with the "
            "policy's own routing; set critic.trunk = 'own', or leave replay_routing out"
        )
    if c.probe.replay and c.sampler.name == "embedded":
        yield (
            "probe.replay asks a server and sampler.name = 'embedded' computes here; leave it out, "
            "or set sampler.name = 'vllm'"
        )
    if c.probe.replay and c.sampling.temperature != 1:
        yield (
            f"probe.replay and sampling.temperature = {c.sampling.temperature:g}: vLLM scores "
            "given tokens at a temperature of 1 only; leave one of them out"
        )
    if c.strict_precision and (advice := precision.disagreement(precision.parse(c.precision))):
        yield f"{advice}; strict_precision = true makes this an error"
    if found := c.alarms.contradiction(
        own=c.precision,
        strict=c.strict_precision,
        urls=c.sampler.url,
        checkpoint_every=c.checkpoint.every,
    ):
        yield found
    if c.data.eval_path is None and c.eval.every:
        yield f"eval.every = {c.eval.every} needs data.eval_path"
