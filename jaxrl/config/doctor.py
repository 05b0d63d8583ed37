"""Every key of `jaxrl doctor`."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from jaxrl.config.data import PromptConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.sampler import SamplerConfig
from jaxrl.config.section import Attention, ClipRange, Remat, Section, Seed, Texts
from jaxrl.config.tables import ModelConfig
from jaxrl.core import Precision
from jaxrl.losses import Clip, Unit


class DoctorDataConfig(PromptConfig):
    """Prompts; the size of beta depends on their completions."""

    path: str | None = None
    """Prompts in any form that `data.path` of `jaxrl train` has. Without it,
    every prompt is one random token."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are dropped."""


class DoctorSamplingConfig(Section):
    """Sampling, always at a temperature of 1 from the whole vocabulary."""

    max_tokens: PositiveInt = 128
    """Maximum completion length, in tokens; the sequence mismatch grows with it."""

    max_batch: PositiveInt = 64
    """Completions that the embedded sampler decodes at once."""


def joined_policies(parts: Iterable[str]) -> tuple[str, ...]:
    """Rejoins dtype policies split at commas, since a part with an = belongs to the one before it;
    raises ValueError as `Precision.parse`."""
    found: list[str] = []
    for part in parts:
        changes = "=" in part.partition(",")[0] and found
        found[-1:] = [f"{found[-1]},{part}"] if changes else [*found[-1:], part]
    for text in found:
        Precision.parse(text)
    return tuple(dict.fromkeys(found))


class DoctorConfig(Section):
    """Every key of a measurement."""

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
    """Dtype policies to compare: presets, each followed by its changes, if any, as in
    fp32,bf16_master,logits=bf16. Running servers keep their dtype; only the learner's changes."""

    prompts: PositiveInt = 16
    """Number of prompts: the first of the data."""

    completions: PositiveInt = 4
    """Completions per prompt."""

    clip_range: ClipRange = (0.2, 0.2)

    clip_unit: Unit = "token"
    """Unit whose ratio is clipped: each `token`; or a whole sequence, by the geometric `mean` over
    its tokens, as in gspo, or by their `product`, as in rloo."""

    timed_steps: NonNegativeInt = 2
    """Training steps to time; the fastest counts. 0 times none."""

    microbatch_tokens: PositiveInt = 4096
    """Tokens of one forward and backward pass on a data-parallel shard, as in training."""

    remat: Remat = "matmuls"
    attention: Attention = "auto"

    out: str = "doctor"
    """Directory for doctor.json and doctor.png."""

    seed: Seed = 0
    """Random seed; the completions are a function of the model, the data and this number."""

    @field_validator("precisions")
    @classmethod
    def _precisions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return joined_policies(value)

    @property
    def by_text(self) -> dict[str, Precision]:
        """The dtype policies to compare, by their texts."""
        return {text: Precision.parse(text) for text in self.precisions}

    @property
    def clip(self) -> Clip:
        """The clip that rounding alone may reach."""
        return Clip(*self.clip_range, self.clip_unit)

    @property
    def longest_sequence(self) -> int:
        """Maximum length of a prompt with its completion, in tokens."""
        longest_prompt = 1 if self.data.path is None else self.data.max_prompt_tokens
        return longest_prompt + self.sampling.max_tokens
