"""The tables of a config: every key with its name, type, default and meaning.

A table is frozen and strict. `--help` prints the docstrings below.
"""

import functools
import typing
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from jaxrl.core import precision
from jaxrl.core.precision import Precision
from jaxrl.learner.optimizers import OptimizerName, ScheduleName

Fraction = Annotated[float, Field(gt=0, le=1)]
# TOML arrays arrive as lists, which strict mode would refuse for a tuple.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]


def _plain(value: Any) -> Any:
    if not isinstance(value, float | int | str) or value != value:
        raise ValueError("numbers, texts and booleans only")
    return value


# A key that a table hands on to a function, whose annotations say more.
Plain = Annotated[float | int | bool | str, PlainValidator(_plain)]

Remat = Literal["none", "matmuls", "attention", "layer"]
Attention = Literal["auto", "xla", "splash", "cudnn"]


class Section(BaseModel):
    """A table of keys; unknown keys, wrong types and NaN are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _none(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML has no null: "none" stands for it where a key may be None."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        return None if value == "none" and type(None) in typing.get_args(annotation) else value


class ModelConfig(Section):
    """The model that is trained."""

    path: str
    """Directory of a Hugging Face checkpoint: config.json, *.safetensors and tokenizer."""


class PromptConfig(Section):
    """How a prompt's text becomes tokens."""

    template: Literal["auto", "chat", "text"] = "auto"
    """How a prompt is rendered: `chat` through the tokenizer's chat template, `text` as it is,
    `auto` chosen by whether the tokenizer has a chat template."""

    system_prompt: str | None = None
    """System message in front of every prompt; needs a chat template."""

    prompt_format: str = "{prompt}"
    """Text of the user's message; `{prompt}` stands for the prompt of the data."""

    @field_validator("prompt_format")
    @classmethod
    def _holds_prompt(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError("the prompt itself would be lost; write {prompt} where it belongs")
        return value


class DataConfig(PromptConfig):
    """Prompts to train on and held-out prompts to evaluate on."""

    path: str
    """Training prompts: a .jsonl or .parquet file, or the id of a data set on the Hugging Face
    hub (needs the `hub` extra)."""

    eval_path: str | None = None
    """Held-out prompts, in the same forms."""

    subset: str | None = None
    """Name of the data set's configuration on the hub, such as `main` for openai/gsm8k."""

    split: str = "train"
    """Split of a hub data set to train on."""

    eval_split: str = "test"
    """Split of a hub data set to evaluate on."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    answer_key: str | None = "answer"
    """Column with the reference answer, which rewards find as `example["answer"]`; `none` if the
    data has no such column."""

    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are left out, and their number is reported."""

    eval_limit: PositiveInt | None = None
    """Evaluate on this many held-out prompts, the first ones of the file; all when absent."""


class LossConfig(Section):
    """The loss; further keys of this table are keyword arguments of the recipe, or of
    jaxrl.losses.with_terms (kl, entropy, correction, ...): see `jaxrl losses`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Plain] = Field(init=False)

    name: str = "grpo"
    """Recipe: a name in jaxrl.losses.recipes, `file.py:function` or `package.module:function`."""

    advantage: str | None = None
    """Advantage estimator: a name in jaxrl.advantages.estimators, `file.py:function` or
    `package.module:function`; the recipe's own when absent."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword arguments for the recipe, to be checked against its signature."""
        return dict(self.__pydantic_extra__)


class SamplingConfig(Section):
    """How answers are drawn, and when they end."""

    max_tokens: PositiveInt = 512
    """Longest answer, in tokens."""

    temperature: PositiveFloat = 1.0
    """Divides the logits; also part of the learner's log-probs. Evaluation is greedy."""

    top_p: Fraction = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all. A training run
    keeps all: docs/precision.md."""

    top_k: NonNegativeInt = 0
    """Keep this many most probable tokens; 0 keeps all, as a training run does."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less probable than this times the largest probability; 0 drops none, as a
    training run does."""

    stop: Texts = ()
    """Texts that end an answer, besides the end-of-sequence tokens of the model."""

    max_batch: PositiveInt = 64
    """Answers that the embedded sampler decodes at once; more is faster and takes more memory."""


class ServerConfig(Section):
    """A vLLM server on this machine."""

    python: str = ".venv-vllm/bin/python"
    """Interpreter of the environment with vLLM and jaxrl (scripts/install_vllm.sh makes one for the
    CPU)."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Which build of vLLM that environment has."""

    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port; 0 takes a free one."""

    kv_cache_bytes: PositiveInt | None = None
    """Memory for keys and values. When absent a GPU's is left to vLLM; on a CPU it is what the
    answers need that are asked for at a time, at least 256 MiB, and at most a quarter of the memory
    that is free unless one answer needs more."""

    max_lora_rank: NonNegativeInt = 0
    """Largest rank of adapters that it can be given by themselves; a run with lora.publish =
    'adapters' starts its own server with lora.rank."""

    arguments: Texts = ()
    """Further arguments of vLLM's api_server."""


class SamplerConfig(ServerConfig):
    """Where answers come from: JAX itself, or vLLM servers that the weights are published to."""

    name: Literal["embedded", "vllm"] = "embedded"
    """`embedded` decodes on the learner's devices; `vllm` asks servers."""

    rules: Literal["data", "fsdp", "tensor", "fsdp_tensor", "expert", "all"] | None = None
    """How the embedded sampler's weights and answers are cut over the mesh, as `mesh.rules`; as the
    learner's when absent. `data` keeps whole weights on each device, so that a token costs no
    traffic."""

    url: Texts = ()
    """Addresses of running servers (`jaxrl serve`), such as http://127.0.0.1:8000; when empty, one
    is started with the keys below and ends with the run."""

    transport: Literal["shared_memory", "directory"] = "shared_memory"
    """How weights reach the servers: the memory of this host, or `directory`."""

    directory: str | None = None
    """A directory that servers see under the same path, for the transport `directory`; each version
    becomes a Hugging Face checkpoint there."""

    in_flight: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of requests in flight when the weights change: they go on with the new weights,
    end first, or are ended and continued with new requests."""

    max_requests: PositiveInt = 32
    """Requests that a server has at a time; a prompt's whole group is one."""

    timeout: PositiveFloat = 600.0
    """Seconds that a request, or a part of a publish, may take."""


class TrainConfig(Section):
    """The loop's sizes.

    Three batch sizes follow one from the other. The *rollout*: `train_batch` prompts are answered
    `group_size` times each by one version of the policy. The *mini-batch*: these answers are
    divided into `updates_per_rollout` equal parts, and each part makes one optimizer step. The
    *microbatch*: what is computed at a time on one data-parallel shard, `microbatch_tokens`
    tokens; gradients of a mini-batch's microbatches are added exactly, so this size changes speed
    and memory and never the result.
    """

    steps: PositiveInt = 100
    """Number of rollouts; each is followed by `updates_per_rollout` optimizer steps."""

    train_batch: PositiveInt = 32
    """Prompts per rollout."""

    group_size: PositiveInt = 8
    """Answers per prompt; the advantages of a group are relative to each other."""

    updates_per_rollout: PositiveInt = 1
    """Mini-batches per rollout, one optimizer step each; 1 is exactly on-policy."""

    refill_rounds: Annotated[int, Field(ge=0, le=10)] = 0
    """Dynamic sampling (DAPO): groups whose answers all earn the same are left out, and up to this
    many times `train_batch` further prompts are answered until there are `train_batch` others.
    Those beyond wait for the next step. 0 learns from every group."""

    mask_truncated: bool = False
    """Learn nothing from answers that sampling.max_tokens cut. Their rewards still count in the
    mean and the spread of their group."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens, padding included, of one forward and backward pass on a data-parallel shard; rounded
    down to whole rows."""

    row_length: PositiveInt | None = None
    """Tokens in a row of the learner's batch; data.max_prompt_tokens + sampling.max_tokens when
    absent. With packing, longer rows waste less."""

    packing: bool = True
    """Put several short sequences into a row; otherwise one to a row."""

    replay_routing: bool = False
    """For mixtures of experts and the embedded sampler: the learner sends each token to the experts
    that it was sent to when the answer was drawn. The routers still learn."""

    remat: Remat = "matmuls"
    """What the backward pass computes again instead of keeping it: `none`; `matmuls` all but matrix
    products and attention, which costs next to nothing; `attention` all but attention; `layer` all
    of a layer, the least memory."""

    attention: Attention = "auto"
    """Its kernel: `xla` runs everywhere, `splash` on TPUs, `cudnn` on NVIDIA GPUs; `auto` takes the
    one of the devices where the model and the dtypes allow it, and the run says which."""

    profile_steps: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] | None = None
    """First and last step of a JAX trace that is written to run_dir/profile."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: OptimizerName = "adamw"
    """Update rule; muon applies to matrices and leaves the other parameters to adamw."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""

    schedule: ScheduleName = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 at the last optimizer step."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate rises linearly from 0."""

    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Field(strict=False),
    ] = (0.9, 0.95)
    """Decay of the first and second moment; sgd and muon use the first as momentum."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices."""

    clip_norm: PositiveFloat | None = 1.0
    """Largest global norm of the gradient; `none` does not clip."""

    offload: bool = False
    """Keep moments in the host's memory between two steps: less of the devices', slower steps."""


class CheckpointConfig(Section):
    """Saving, from which a killed run goes on bit for bit."""

    every: NonNegativeInt = 20
    """Save after this many steps; 0 saves at the end and on SIGTERM only."""

    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""

    keep_best: NonNegativeInt = 1
    """Checkpoints of best held-out accuracy that are kept besides."""


class EvalConfig(Section):
    """Greedy accuracy on data.eval_path."""

    every: NonNegativeInt = 0
    """Evaluate after this many steps; 0 evaluates before the first and after the last only."""


# Reading a config parses its policies; every later use takes them from here.
parse_policy = functools.cache(precision.parse)


def _parsed(text: str) -> str:
    parse_policy(text)
    return text


class BaseConfig(Section):
    """Keys that every command with a model has."""

    precision: str = "bf16_master"
    """Dtype policy: a preset (fp32, bf16, bf16_master, fp16_master, phantom), a preset with changes
    (`bf16_master,wire=f32`) or every role by name."""

    seed: int = 0
    """The run is a function of the config, the data and this number."""

    _precision = field_validator("precision")(_parsed)

    @property
    def policy(self) -> Precision:
        """The dtype policy that `precision` names."""
        return parse_policy(self.precision)


class ProbeConfig(Section):
    """The importance ratio taken apart into what the policy moved (alpha) and what the arithmetic
    added (beta), as metrics `probe/...`; see docs/precision.md."""

    every: NonNegativeInt = 10
    """Probe the first mini-batch of every so many rollouts, at the cost of two forward passes; 0
    never does."""

    replay: bool = False
    """Let the vLLM server score the same tokens, which takes the arithmetic apart into dtype and
    engine; needs sampler.name = vllm and a temperature of 1."""

    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clipping is counted below a ratio of 1 - low."""

    high: PositiveFloat = 0.2
    """Clipping is counted above a ratio of 1 + high."""


class RunConfig(BaseConfig):
    """Keys that every long-running command has."""

    run_dir: str = "runs/latest"
    """Directory of checkpoints, metrics and pictures; a run found there is continued."""
