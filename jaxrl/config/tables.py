"""The tables that most commands share: every key with its type, default and meaning.

`--help` prints the docstrings below.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from jaxrl.config.section import Attention, DtypePolicy, OpenSection, Remat, Section, Seed
from jaxrl.core import Precision
from jaxrl.learner import OptimizerName, ScheduleName


class ModelConfig(Section):
    """The model to train."""

    path: str
    """Directory of a Hugging Face checkpoint (config.json, *.safetensors and tokenizer), or a model
    of the hub: `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@COMMIT`."""


class PromptConfig(Section):
    """Rendering of prompts as text."""

    template: Literal["auto", "chat", "text"] = "auto"
    """`chat` applies the tokenizer's chat template, `text` leaves the prompt unchanged, `auto`
    applies the chat template if the tokenizer has one."""

    system_prompt: str | None = None
    """System message before every prompt; needs a chat template."""

    prompt_format: str = "{prompt}"
    """Text of the user message; `{prompt}` stands for the prompt in the data."""

    @field_validator("prompt_format")
    @classmethod
    def _holds_prompt(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError("the prompt itself would be lost; write {prompt} where it belongs")
        return value

    def _contradictions(self) -> Iterator[str]:
        if self.system_prompt is not None and self.template == "text":
            yield (
                "system_prompt needs a chat template, and template = 'text' uses none; put the "
                "text into prompt_format, or set template = 'chat'"
            )


class TextsConfig(PromptConfig):
    """Prompts or texts to train on."""

    path: str
    """A .jsonl or .parquet file, or a data set on the Hugging Face hub, written `ID`, `ID:SUBSET`
    or `ID:SUBSET:SPLIT` (split `train` if not given; needs the `hub` extra)."""


class HeldOutConfig(TextsConfig):
    """Data to train on and held-out data."""

    eval_path: str | None = None
    """Held-out data, in the same forms (split `test` if not given)."""

    eval_limit: PositiveInt | None = None
    """Evaluate on the first N rows of the held-out data; on all of them if absent."""


class DataConfig(HeldOutConfig):
    """Training prompts and held-out prompts."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    answer_key: str | None = "answer"
    """Column with the reference answer, which reward functions read as `example["answer"]`; `none`
    if the data has no such column."""

    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are dropped and counted."""


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
    """Completions per prompt; they form the group that advantages are relative to."""

    updates_per_rollout: PositiveInt = 1
    """Mini-batches per rollout batch, one optimizer step each; 1 is exactly on-policy."""

    dynamic_sampling_rounds: Annotated[int, Field(ge=0, le=10)] = 0
    """Dynamic sampling (DAPO): drop groups whose completions all earn the same reward, and sample
    up to this many times `train_batch` more prompts to fill the batch. Surplus groups are kept for
    the next step. 0 trains on every group."""

    mask_truncated: bool = False
    """Exclude truncated completions from the loss (DAPO's overlong filtering). Their rewards still
    count in the mean and the standard deviation of their group."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens, padding included, of one forward and backward pass on a data-parallel shard; rounded
    down to whole rows."""

    row_length: PositiveInt | None = None
    """Tokens in a row of the learner's batch. If absent: whole groups if prompts are shared, else
    data.max_prompt_tokens + sampling.max_tokens. With packing, longer rows waste less."""

    packing: bool = True
    """Pack several sequences into a row; share the prompt of a group where attention can."""

    replay_routing: bool = False
    """Routing replay, for mixtures of experts: the learner sends each token to the experts that the
    sampler used. The routers are still trained. vLLM reports them on GPUs only."""

    remat: Remat = "matmuls"
    """Recomputation in the backward pass: `none`; `matmuls` recomputes everything except matrix
    products and attention, at almost no cost; `attention` everything except attention; `layer`
    whole layers, which takes the least memory."""

    attention: Attention = "auto"
    """Attention kernel: `xla` runs everywhere, `splash` on TPUs, `cudnn` on NVIDIA GPUs. `auto`
    takes the device's own kernel if it supports the model and the dtypes; the log names it."""

    profile_steps: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] | None = None
    """First and last step of a JAX trace, written to run_dir/profile."""

    def _contradictions(self) -> Iterator[str]:
        completions = self.train_batch * self.group_size
        if self.group_size == 1 and self.dynamic_sampling_rounds:
            yield (
                f"train.dynamic_sampling_rounds = {self.dynamic_sampling_rounds} drops groups "
                "whose completions all earn the same, which with train.group_size = 1 are all "
                "groups; set it to 0, or train.group_size to 2 or more"
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


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: OptimizerName = "adamw"
    """Update rule; muon applies to matrices and uses adamw for all other parameters."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""

    schedule: ScheduleName = "constant"
    """Learning rate after warmup: constant, or decaying to 0 at the last optimizer step."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""

    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Field(strict=False),
    ] = (0.9, 0.95)
    """Decay of the first and second moment; sgd and muon use the first as momentum."""

    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, applied to matrices only."""

    clip_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm; `none` disables clipping."""

    offload: bool = False
    """Keep the moments in host memory between steps: saves device memory, slows steps down."""


class CheckpointConfig(Section):
    """Checkpoints; a killed run resumes from the newest one, bit for bit."""

    every: NonNegativeInt = 20
    """Save after this many steps; 0 saves only at the end and on SIGTERM."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""

    keep_best: NonNegativeInt = 1
    """Number of checkpoints with the best held-out accuracy to keep as well."""


class EvalConfig(Section):
    """Greedy accuracy on data.eval_path."""

    every: NonNegativeInt = 0
    """Evaluate after this many steps; 0 evaluates only before the first and after the last."""


class BaseConfig(Section):
    """Keys of every command that loads a model."""

    precision: DtypePolicy = Precision.parse("bf16_master")
    """Dtype policy: a preset (fp32, bf16, bf16_master, fp16_master, phantom), a preset with changes
    (`bf16_master,wire=f32`), or every role by name."""

    seed: Seed = 0
    """Random seed; a run is a function of the config, the data and this number."""


class RunConfig(BaseConfig):
    """Keys of every command that trains."""

    run_dir: str = "runs/latest"
    """Directory of checkpoints, metrics and plots; a run found there is resumed."""


class SamplesConfig(Section):
    """Completions logged to samples.jsonl, for `jaxrl report`."""

    every: NonNegativeInt = 10
    """Log samples every this many steps; 0 logs none. Entropy and |beta| of their tokens are logged
    in steps that probe.every probes."""


class TrackingConfig(Section):
    """Services that receive the metrics besides metrics.jsonl and TensorBoard."""

    wandb: str | None = None
    """Weights & Biases project (pip install wandb)."""

    mlflow: str | None = None
    """MLflow experiment (pip install mlflow), at MLFLOW_TRACKING_URI."""
