"""Every key of `jaxrl doctor`."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from jaxrl.config.mesh import MeshConfig
from jaxrl.config.tables import (
    ModelConfig,
    PromptConfig,
    Remat,
    SamplerConfig,
    Section,
    Texts,
    parse_policy,
)
from jaxrl.core.precision import Precision


class DoctorDataConfig(PromptConfig):
    """Prompts, which decide what is written and so how large beta is."""

    path: str | None = None
    """A .jsonl or .parquet file, or the id of a hub data set. Without it every prompt is one token,
    drawn from the vocabulary, behind which the model writes what it likes."""

    subset: str | None = None
    """Name of the data set's configuration on the hub."""

    split: str = "train"
    """Split of a hub data set."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are left out."""


class DoctorSamplingConfig(Section):
    """How answers are drawn: always at a temperature of 1, from the whole vocabulary."""

    max_tokens: PositiveInt = 128
    """Longest answer, in tokens; the disagreement of sequences grows with it."""

    max_batch: PositiveInt = 64
    """Answers that the embedded sampler decodes at once."""


class DoctorConfig(Section):
    """What is measured."""

    model: ModelConfig
    data: DoctorDataConfig = DoctorDataConfig()
    sampling: DoctorSamplingConfig = DoctorSamplingConfig()
    sampler: SamplerConfig = SamplerConfig()
    mesh: MeshConfig = MeshConfig()

    precisions: Annotated[Texts, Field(min_length=1)] = (
        "fp32",
        "phantom",
        "bf16_master",
        "fp16_master",
    )
    """Policies to compare: presets, each with changes behind it if need be, as in
    fp32,bf16_master,logits=bf16. With a running server, whose dtype is given, only the learner's
    side of a policy counts."""

    prompts: PositiveInt = 16
    """Prompts, the first of the data."""

    answers: PositiveInt = 4
    """Answers to each."""

    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clipping is counted below a ratio of 1 - low."""

    high: PositiveFloat = 0.2
    """Clipping is counted above a ratio of 1 + high."""

    repeat: NonNegativeInt = 2
    """Training steps that are timed, of which the fastest counts; 0 does not time."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens of one forward and backward pass on a data-parallel shard, as in training."""

    remat: Remat = "matmuls"
    """What the backward pass computes again, as in training."""

    out: str = "doctor"
    """Directory for doctor.json and doctor.png."""

    seed: int = 0
    """The answers are a function of the model, the data and this number."""

    @field_validator("precisions")
    @classmethod
    def _policies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """A list's commas are a policy's commas, too: what has an = belongs to the one before."""
        found: list[str] = []
        for part in value:
            changes = "=" in part.partition(",")[0] and found
            found[-1:] = [f"{found[-1]},{part}"] if changes else [*found[-1:], part]
        for policy in found:
            parse_policy(policy)
        return tuple(dict.fromkeys(found))

    @property
    def policies(self) -> dict[str, Precision]:
        """The dtype policies to compare, by their texts."""
        return {text: parse_policy(text) for text in self.precisions}

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and answer together."""
        longest_prompt = 1 if self.data.path is None else self.data.max_prompt_tokens
        return longest_prompt + self.sampling.max_tokens
