"""The tables that most commands share. `--help` prints the docstrings of the keys."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from jaxrl.config.section import Attention, DtypePolicy, OpenSection, Remat, RunDir, Section, Seed
from jaxrl.core import Precision


class ModelConfig(Section):
    """The model to train."""

    path: str
    """Directory of a Hugging Face checkpoint (config.json, *.safetensors and tokenizer), or a model
    of the hub: `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@COMMIT`."""


class LossConfig(OpenSection):
    """The loss. Further keys of this table are keyword arguments of the recipe or of
    jaxrl.losses.with_terms (kl, entropy, correction, ...); `jaxrl losses` lists them."""

    name: str = "grpo"
    """Recipe: a name in jaxrl.losses.recipes, `file.py:function` or `package.module:function`."""

    advantage: str | None = None
    """Advantage estimator: a name in jaxrl.advantages.estimators, `file.py:function` or
    `package.module:function`; the recipe's own if absent."""


class TrainConfig(Section):
    """Batch sizes and the training loop.

    Each step samples a *rollout batch*: `train_batch` prompts with `group_size` completions each,
    all from one policy version. It is split into `updates_per_rollout` *mini-batches* of equal
    size, one optimizer step each. A mini-batch is computed in *microbatches* of `microbatch_tokens`
    tokens per data-parallel shard, whose gradients are summed exactly: this size changes speed and
    memory, never the result.
    """

    steps: PositiveInt = 100
    """Number of rollout batches; `updates_per_rollout` optimizer steps follow each."""

    train_batch: PositiveInt = 32
    """Prompts per rollout batch."""

    group_size: PositiveInt = 8
    """Completions per prompt; advantages compare them with each other."""

    updates_per_rollout: PositiveInt = 1
    """Mini-batches per rollout batch, one optimizer step each; 1 is exactly on-policy."""

    max_kl: PositiveFloat | None = None
    """Early stop (PPO's target_kl): once `mismatch/k3_kl` of a mini-batch, in nats a token, exceeds
    this, the rest of its rollout batch is left out. `update/left_out` counts the mini-batches."""

    dynamic_sampling_rounds: Annotated[int, Field(ge=0, le=10)] = 0
    """Dynamic sampling (DAPO): drop groups whose completions all earn the same reward, and sample
    up to this many times `train_batch` more prompts to fill the batch. Surplus groups are kept for
    the next step, with `rollouts.replay_share` fewer than it takes. 0 trains on every group."""

    mask_truncated: bool = False
    """Exclude truncated completions from the loss (DAPO's overlong filtering). Their rewards still
    count in the mean and the standard deviation of their group."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens, padding included, of one forward and backward pass on a data-parallel shard; rounded
    down to whole rows."""

    row_length: PositiveInt | None = None
    """Tokens in a row of the learner's batch. If absent: whole groups, or parts of one, if prompts
    are shared, else data.max_prompt_tokens + sampling.max_tokens. Longer rows waste less."""

    packing: bool = True
    """Pack several sequences into a row; a group shares its prompt if attention supports it."""

    gate: bool = False
    """Take an optimizer step only if the sampler's policy does not get worse by it (MIPU): the
    estimate of its reward on the mini-batch, in its dtypes, must not fall. Costs two forward
    passes and a copy of weights and moments; `update/rejected` is the share of refused steps."""

    replay_routing: bool = False
    """Routing replay, for mixtures of experts: the learner sends each token to the experts that the
    sampler used. The routers are still trained. vLLM reports them on GPUs only."""

    remat: Remat = "matmuls"
    attention: Attention = "auto"

    profile_steps: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] | None = None
    """First and last step of a JAX trace, written to run_dir/profile."""

    def _contradictions(self) -> Iterator[str]:
        completions = self.train_batch * self.group_size
        if self.group_size == 1 and self.dynamic_sampling_rounds:
            yield (
                f"train.dynamic_sampling_rounds = {self.dynamic_sampling_rounds} drops groups with "
                "equal rewards, and train.group_size = 1 makes all groups such; set it to 0, or "
                "train.group_size to 2 or more"
            )
        if self.max_kl is not None and self.updates_per_rollout == 1:
            yield (
                f"train.max_kl = {self.max_kl:g} leaves out mini-batches after the first, and with "
                "train.updates_per_rollout = 1 there are none; raise it, or leave train.max_kl out"
            )
        if completions % self.updates_per_rollout:
            yield (
                f"train.updates_per_rollout = {self.updates_per_rollout} does not divide the "
                f"rollout batch of train.train_batch x train.group_size = {self.train_batch} x "
                f"{self.group_size} = {completions} completions; choose a divisor"
            )
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            yield (
                f"train.profile_steps = {list(self.profile_steps)}: the last step comes before the "
                "first; swap them"
            )


class CheckpointConfig(Section):
    """Checkpoints; a killed run resumes from the newest one, bit for bit."""

    every: NonNegativeInt = 20
    """Save after this many steps; 0 saves only at the end and on a signal. A run with
    data.eval_path also saves after each evaluation."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""

    keep_best: NonNegativeInt = 1
    """Number of checkpoints with the best held-out accuracy to keep as well; at least 1 if
    `alarms.held_out` rolls back."""


class EvalConfig(Section):
    """Greedy accuracy on data.eval_path."""

    every: NonNegativeInt | None = None
    """Evaluate after this many steps; 0 evaluates only before the first and after the last. By
    default ten times a run; a run of fewer than twenty steps has no evaluation in between."""

    def interval(self, steps: int) -> int:
        """Returns the steps between two evaluations of a run with `steps`; 0 for none."""
        if self.every is not None:
            return self.every
        return steps // 10 if steps >= 20 else 0


class BaseConfig(Section):
    """Keys of every command that loads a model."""

    precision: DtypePolicy = Precision.parse("bf16_master")
    """Dtype policy: a preset (fp32, bf16, bf16_master, fp16_master, phantom), a preset with changes
    (`bf16_master,wire=f32`), or every role by name."""

    seed: Seed = 0
    """Random seed; a run is a function of the config, the data and this number."""


class RunConfig(BaseConfig):
    """Keys of every command that trains."""

    run_dir: RunDir = "runs/latest"
