"""The config of a training run: all of its tables, and the contradictions between them."""

import math
from collections.abc import Iterator

from pydantic import Field, ValidationInfo, field_validator

from jaxrl.config.adapters import LoraConfig
from jaxrl.config.alarms import AlarmsConfig
from jaxrl.config.critic import CriticConfig
from jaxrl.config.data import DataConfig
from jaxrl.config.environment import EnvironmentConfig
from jaxrl.config.fleet import FleetConfig
from jaxrl.config.hosts import HostsConfig
from jaxrl.config.judge import JudgeConfig
from jaxrl.config.mesh import MeshConfig, OwnMeshConfig
from jaxrl.config.optimizer import OptimizerConfig
from jaxrl.config.probe import ProbeConfig
from jaxrl.config.reference import ReferenceConfig
from jaxrl.config.reward import RewardConfig
from jaxrl.config.sampler import RolloutsConfig, SamplerConfig, SamplingConfig
from jaxrl.config.tables import (
    CheckpointConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from jaxrl.config.tracking import SamplesConfig, TrackingConfig
from jaxrl.core import disagreement, short_name
from jaxrl.data import REASONING_GYM


class Config(RunConfig):
    """A reinforcement-learning run."""

    model: ModelConfig
    data: DataConfig
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = Field(default=RewardConfig(), validate_default=True)
    reference: ReferenceConfig = ReferenceConfig()
    loss: LossConfig = LossConfig()
    sampling: SamplingConfig = SamplingConfig()
    sampler: SamplerConfig = SamplerConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    critic_mesh: OwnMeshConfig = OwnMeshConfig()
    reference_mesh: OwnMeshConfig = OwnMeshConfig()
    reward_mesh: OwnMeshConfig = OwnMeshConfig()
    hosts: HostsConfig = HostsConfig()
    fleet: FleetConfig = FleetConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    probe: ProbeConfig = ProbeConfig()
    judge: JudgeConfig = JudgeConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    samples: SamplesConfig = SamplesConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def longest_sequence(self) -> int:
        """Maximum length of a prompt with its completion, in tokens."""
        return self.data.max_prompt_tokens + self.sampling.max_tokens

    @property
    def row_length(self) -> int:
        """Tokens in a row of the learner's batch."""
        return self.train.row_length or self.longest_sequence

    @property
    def microbatch_rows(self) -> int:
        """Rows of one forward and backward pass, over all data-parallel shards."""
        per_shard = self.train.microbatch_tokens // self.row_length
        return per_shard * self.mesh.batch_shards(self.precision.sums)

    @property
    def own_meshes(self) -> dict[str, OwnMeshConfig]:
        """Meshes outside [mesh], by the names of their tables, in the order of their devices."""
        names = ("critic_mesh", "reference_mesh", "reward_mesh")
        tables: dict[str, OwnMeshConfig] = {name: getattr(self, name) for name in names}
        return {name: table for name, table in tables.items() if table.devices}

    @property
    def devices_apart(self) -> dict[str, int]:
        """Numbers of devices outside [mesh], by the keys or tables that ask for them."""
        found = {name: table.devices for name, table in self.own_meshes.items()}
        return found | ({"sampler.devices": self.sampler.devices} if self.sampler.devices else {})

    @property
    def minibatch_completions(self) -> int:
        """Maximum number of completions in one optimizer step."""
        return self.train.train_batch * self.train.group_size // self.train.updates_per_rollout

    @property
    def concurrent_completions(self) -> int:
        """Maximum number of completions that a server samples at the same time."""
        prompts = self.train.train_batch * (self.rollouts.max_staleness + 1)
        return min(self.sampler.max_requests, prompts) * self.train.group_size

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, which a critic's learning rate schedule spans."""
        return self.train.steps * self.train.updates_per_rollout

    @property
    def policy_steps(self) -> int:
        """Optimizer steps of the policy, which its learning rate schedule spans: those after
        `critic.pretrain_steps`."""
        steps = self.train.steps - self.critic.pretrain_steps
        return max(1, steps) * self.train.updates_per_rollout

    @property
    def eval_every(self) -> int:
        """Steps between two evaluations on held-out data; 0 for none."""
        return self.eval.interval(self.train.steps) if self.data.eval_path is not None else 0

    @property
    def checkpoints_kept(self) -> int:
        """Number of newest checkpoints to keep. Where an alarm may roll back, they reach back to
        before the steps that can raise it."""
        if not self.alarms.rolls_back:
            return self.checkpoint.keep
        back = (
            self.alarms.reach(probe_every=self.probe.every, judge_every=self.judge.every)
            + self.checkpoint.every
        )
        dues = (every for every in (self.checkpoint.every, self.eval_every) if every)
        return max(self.checkpoint.keep, sum(math.ceil(back / every) for every in dues) + 1)

    @field_validator("reward")
    @classmethod
    def _has_a_reward(cls, value: RewardConfig, info: ValidationInfo) -> RewardConfig:
        environment = info.data.get("environment", EnvironmentConfig())
        if not value.path and value.model is None and environment.name is None:
            if (rows := info.data.get("data")) and rows.path.startswith(REASONING_GYM):
                return value.model_copy(update={"path": ("reasoning_gym",)})
            raise ValueError(
                "reward.path is missing, and so are reward.model and environment.name: set at "
                "least one, such as reward.path = ['exact_match']"
            )
        return value

    def _contradictions(self) -> Iterator[str]:
        found = list(_between_tables(self))
        yield from found
        yield from (line for line in _after_rollback(self) if line not in found)


def _between_tables(c: Config) -> Iterator[str]:
    yield from _sizes(c)
    yield from _algorithm(c)
    yield from _sampling(c)
    yield from _weight_sync(c)
    yield from _fixed_sums(c)
    yield from _blocks(c)
    yield from _alarms(c)
    yield from _own_meshes(c)
    yield from c.optimizer.conflicts(c.precision, steps=c.policy_steps)
    yield from c.fleet.conflicts(c.sampler, c.hosts, run_dir=c.run_dir)


def _after_rollback(c: Config) -> Iterator[str]:
    """Describes what alarms.precision contradicts: a run must not learn it from an alarm."""
    if (new := c.alarms.precision) is None:
        return
    alarms = c.alarms.model_copy(update={"precision": None})
    for line in _between_tables(c.model_copy(update={"precision": new, "alarms": alarms})):
        own = line.startswith("precision = ")
        yield f"alarms.{line}" if own else f"alarms.precision = {new.text!r}: {line}"


def _own_meshes(c: Config) -> Iterator[str]:
    own, url = c.own_meshes, c.reference.server
    if "critic_mesh" in own and c.critic.trunk == "shared":
        yield (
            "critic_mesh and critic.trunk = 'shared', whose trunk is the policy's; leave "
            "critic_mesh out, or set critic.trunk = 'own'"
        )
    if "reference_mesh" in own and url is not None:
        yield f"reference_mesh and reference.server = {url!r}: leave one of the two out"
    if "reward_mesh" in own and (c.reward.model is None or c.reward.model_url):
        yield (
            f"reward_mesh is for a model in a directory, and reward.model = {c.reward.model!r}; "
            "leave reward_mesh out"
        )
    yield from c.reference.conflicts(c.sampling)
    for name, mesh in own.items():
        if c.microbatch_rows % (shards := mesh.batch_shards(c.precision.sums)):
            yield (
                f"{name} divides the {c.microbatch_rows} rows of a microbatch into "
                f"{shards} shards; change its sizes, or train.microbatch_tokens"
            )


def _fixed_sums(c: Config) -> Iterator[str]:
    if c.precision.sums != "fixed":
        return
    key = f"precision = {c.precision.text!r}: sums=fixed"
    if c.sampler.name != "embedded":
        yield f"{key} applies to sampler.name = 'embedded' only; leave it out"
    if (difference := disagreement(c.precision)) is not None:
        yield f"{key}, but {difference}"
    for name in ("tensor", "expert"):
        if (size := getattr(c.sampler, name) or 1) > 1:
            yield (
                f"{key}, but sampler.{name} = {size} divides sums over devices; leave it out: each "
                "device then decodes its own rows with whole weights"
            )


def _blocks(c: Config) -> Iterator[str]:
    key, blocks = f"precision = {c.precision.text!r}", c.precision.blocks
    if blocks == "none" or c.sampler.name == "embedded":
        return
    if blocks != "int8" or c.sampler.name != "vllm":
        yield (
            f"{key}: blocks={blocks} does not apply to sampler.name = {c.sampler.name!r}; leave it "
            "out, use blocks=int8 with 'vllm', or the embedded sampler"
        )
    elif c.lora.rank and c.lora.publish == "adapters":
        yield (
            f"{key}: blocks={blocks} rounds merged weights, and lora.publish = 'adapters' sends "
            "none; set lora.publish = 'merged'"
        )


def _sizes(c: Config) -> Iterator[str]:
    if c.row_length < c.longest_sequence:
        yield (
            f"train.row_length = {c.row_length} is shorter than data.max_prompt_tokens + "
            f"sampling.max_tokens = {c.longest_sequence}; raise it or leave it out"
        )
    if c.train.microbatch_tokens < c.row_length:
        yield (
            f"train.microbatch_tokens = {c.train.microbatch_tokens} does not hold one row of "
            f"{c.row_length} tokens; raise it to a multiple of {c.row_length}"
        )
    if c.row_length % c.mesh.row_shards:
        wanted = math.ceil(c.row_length / c.mesh.row_shards) * c.mesh.row_shards
        yield (
            f"mesh.context = {c.mesh.context} splits a row into {c.mesh.row_shards} shards, which "
            f"do not divide {c.row_length} tokens; set train.row_length = {wanted}"
        )
    if (share := c.rollouts.replay_share) and share * c.train.train_batch < 1:
        yield (
            f"rollouts.replay_share = {share:g} of train.train_batch = {c.train.train_batch} "
            "groups is less than one; raise it, or leave it out"
        )
    if c.reward.overlong_buffer > c.sampling.max_tokens:
        yield (
            f"reward.overlong_buffer = {c.reward.overlong_buffer} is larger than "
            f"sampling.max_tokens = {c.sampling.max_tokens}; lower it"
        )
    if c.data.eval_path is None and c.eval.every:
        yield f"eval.every = {c.eval.every} needs data.eval_path"


def _algorithm(c: Config) -> Iterator[str]:
    if c.data.eval_path is not None and not c.reward.path and c.environment.name is None:
        yield (
            "data.eval_path needs a function in reward.path that decides which completions are "
            "correct; with weight 0 in reward.weights it is logged but not trained on"
        )
    if c.reward.nothing_counts and c.environment.name is None:
        yield (
            f"reward.weights = {[*c.reward.weights]} gives no completion a reward, so nothing "
            "would be learnt; give one part another weight"
        )
    if c.critic.trunk == "shared" and c.lora.rank:
        yield (
            f"critic.trunk = 'shared' would train the trunk that lora.rank = {c.lora.rank} keeps "
            "frozen; set critic.trunk = 'own' or lora.rank = 0"
        )
    if c.train.replay_routing and c.critic.trunk == "shared":
        yield (
            "train.replay_routing and critic.trunk = 'shared': values are computed with the "
            "policy's own routing; set critic.trunk = 'own', or leave train.replay_routing out"
        )
    if c.train.gate and c.critic.trunk == "shared":
        yield (
            "train.gate judges the policy's step, and critic.trunk = 'shared' takes it together "
            "with the critic's: set critic.trunk = 'own', or leave train.gate out"
        )
    if c.train.gate and c.optimizer.offload:
        yield (
            "train.gate compares two states, and optimizer.offload = true keeps the moments in "
            "host memory: leave one of the two out"
        )


def _sampling(c: Config) -> Iterator[str]:
    shared = c.sampler.name != "vllm" and not c.sampler.devices
    local = c.reward.model is not None and not c.reward.model_url
    on_mesh = shared or (local and "reward_mesh" not in c.own_meshes)
    if c.rollouts.max_staleness and math.prod(c.mesh.sizes.values()) > 1 and on_mesh:
        yield (
            f"rollouts.max_staleness = {c.rollouts.max_staleness} on a mesh of several devices: "
            "two threads that start programs on the same devices block each other. Sample on other "
            "devices (sampler.devices) or a server (sampler.name = 'vllm'), with reward.model left "
            "out, behind a server or in a reward_mesh, or set rollouts.max_staleness = 0"
        )
    started = c.sampler.name == "vllm" and not c.sampler.url
    if c.train.replay_routing and started and c.sampler.device == "cpu":
        yield (
            "train.replay_routing needs a sampler that reports the experts of each token, which "
            "vLLM's CPU build cannot (its newer model runner needs Triton); set sampler.device = "
            "'cuda' or sampler.name = 'embedded', or leave train.replay_routing out"
        )
    if c.train.replay_routing and c.sampler.name == "vllm_tpu":
        yield (
            "train.replay_routing needs a sampler that reports the experts of each token, and "
            "sampler.name = 'vllm_tpu' serves only models without experts; leave it out"
        )
    yield from c.sampling.conflicts(c.sampler, replay=c.probe.replay)
    if c.precision.latent == "sampler" and c.sampler.name != "embedded":
        yield (
            f"precision = {c.precision.text!r}: latent=sampler applies to sampler.name = "
            "'embedded' only; leave it out"
        )
    if c.probe.replay and c.sampler.name != "vllm":
        yield (
            f"probe.replay needs a server, and sampler.name = {c.sampler.name!r} uses none; leave "
            "it out, or set sampler.name = 'vllm'"
        )
    if c.probe.replay and c.sampling.temperature != 1:
        yield (
            f"probe.replay and sampling.temperature = {c.sampling.temperature:g}: vLLM scores "
            "given tokens only at a temperature of 1; leave one of the two out"
        )


def _weight_sync(c: Config) -> Iterator[str]:
    if c.precision.wire.itemsize == 1 and (c.sampler.name != "embedded" or c.lora.rank):
        yield (
            f"precision = {c.precision.text!r}: weights in 8 bits need sampler.name = 'embedded' "
            "and lora.rank = 0; give wire another dtype"
        )
    for key, url in (("reference.server", c.reference.server), ("reward.model", c.reward.model)):
        if url is not None and c.sampler.publishes_to(url):
            yield (
                f"{key} = {url!r} is in sampler.url, whose servers get the learner's weights; "
                "start one for it alone"
            )
    reasons = {
        f"rollouts.max_staleness = {c.rollouts.max_staleness}: the server samples while the "
        "learner trains": c.rollouts.max_staleness,
        f"[mesh] of {math.prod(c.mesh.sizes.values())} devices: it is for a learner and a server "
        "on one GPU": math.prod(c.mesh.sizes.values()) > 1,
        "lora.publish = 'adapters': the base weights are lost asleep, and only a publish of "
        "merged weights brings them": c.lora.publish == "adapters",
        "probe.replay: the server scores while the learner trains": c.probe.replay,
    }
    for reason, given in reasons.items():
        if c.sampler.sleep and given:
            yield f"sampler.sleep and {reason}; leave one of the two out"
    if c.lora.publish == "adapters" and c.sampler.name != "vllm":
        yield (
            "lora.publish = 'adapters' needs a server that loads them; set sampler.name = 'vllm', "
            "or lora.publish = 'merged'"
        )
    if c.lora.publish == "adapters" and c.rollouts.order == "finished":
        yield (
            "rollouts.order = 'finished' lets a completion outlive any number of versions, and "
            "with lora.publish = 'adapters' servers keep only a few; set rollouts.order = 'begun', "
            "or lora.publish = 'merged'"
        )


def _alarms(c: Config) -> Iterator[str]:
    if c.alarms.rolls_back and not c.checkpoint.every:
        yield (
            "checkpoint.every = 0 leaves no checkpoint for an alarm to roll back to; set "
            "checkpoint.every, or let the alarm pause"
        )
    new, old, rule = c.alarms.precision, c.precision, c.alarms.changes_precision
    if new is None:
        return
    if (new.params, new.moments) != (old.params, old.moments):
        yield (
            f"alarms.precision = {new.text!r} has other dtypes of master weights or "
            f"moments than precision = {old.text!r}, so the checkpoints would not fit; change "
            "other roles"
        )
    elif rule and c.sampler.url and new.sampler != old.sampler:
        yield (
            f"alarms.{rule} = 'rollback_precision' would change the sampler from "
            f"{short_name(old.sampler)} to {short_name(new.sampler)}, but the "
            "servers of sampler.url keep the dtype that they were started with; let the alarm "
            "pause, or let the run start its server (without sampler.url)"
        )
