"""The `[lora]` table of a config."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from jaxrl.config.tables import Section, Texts


class LoraConfig(Section):
    """Adapters that are trained in the place of the policy's own parameters."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all parameters."""

    alpha: PositiveFloat = 32.0
    """The adapters' product is multiplied by alpha / rank."""

    targets: Annotated[Texts, Field(min_length=1)] = ("*_proj",)
    """Modules that get an adapter, as patterns with * and ?: `q_proj`, `*_proj` for all matrices of
    the layers except those of experts."""

    path: str | None = None
    """Directory of adapters in PEFT's format to begin with; new ones when absent."""

    publish: Literal["merged", "adapters"] = "merged"
    """What samplers get: whole weights with the adapters added in, or the adapters alone, as vLLM
    servers can take them."""

    @model_validator(mode="after")
    def _adapters_have_a_rank(self) -> Self:
        if not self.rank and self.path is not None:
            raise ValueError(
                f"lora.path = {self.path!r} names adapters, and lora.rank = 0 trains none; set "
                "lora.rank to theirs"
            )
        if not self.rank and self.publish == "adapters":
            raise ValueError(
                "lora.publish = 'adapters', and lora.rank = 0 trains none; set lora.rank"
            )
        return self
