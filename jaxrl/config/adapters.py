"""The `[lora]` table of a config."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from jaxrl.config.section import Section, Texts


class AdaptersConfig(Section):
    """LoRA adapters, trained instead of the model's own parameters."""

    rank: Annotated[NonNegativeInt, Field(le=65536)] = 0
    """Rank of the adapters; 0 trains all parameters."""

    alpha: PositiveFloat = 32.0
    """The adapters' product is scaled by alpha / rank."""

    targets: Annotated[Texts, Field(min_length=1)] = ("*_proj",)
    """Modules that get an adapter, as patterns with * and ?: `q_proj`, `lm_head` (the output
    layer), or `*_proj` for all matrices of the layers except those of experts."""

    path: str | None = None
    """Directory of adapters in PEFT's format to start from; new adapters if absent."""

    @property
    def adapts_head(self) -> bool:
        """True if the output layer gets an adapter."""
        return self.rank > 0 and any(fnmatchcase("lm_head", target) for target in self.targets)

    def _contradictions(self) -> Iterator[str]:
        if not self.rank and self.path is not None:
            yield (
                f"lora.path = {self.path!r} names adapters, but lora.rank = 0 trains none; set "
                "lora.rank to theirs"
            )


class LoraConfig(AdaptersConfig):
    """LoRA adapters, trained instead of the policy's own parameters."""

    publish: Literal["merged", "adapters"] = "merged"
    """Weights that samplers receive: whole ones with the adapters merged in, or the adapters
    alone, which vLLM servers can load."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if not self.rank and self.publish == "adapters":
            yield "lora.publish = 'adapters', but lora.rank = 0 trains none; set lora.rank"
        if self.adapts_head and self.publish == "adapters":
            yield (
                f"lora.targets = {list(self.targets)} includes lm_head, and servers apply adapters "
                "of the layers alone; set lora.publish = 'merged', or leave lm_head out"
            )
