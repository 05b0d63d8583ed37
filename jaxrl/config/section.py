"""The base class of every config table, and the types that its keys share."""

import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

# TOML arrays arrive as lists, which strict mode would refuse for a tuple.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
ClipRange = Annotated[
    tuple[Annotated[float, Field(gt=0, lt=1)], PositiveFloat], Field(strict=False)
]


def _plain(value: Any) -> Any:
    if not isinstance(value, float | int | str) or value != value:
        raise ValueError("numbers, texts and booleans only")
    return value


# A key that a table passes on to a function, whose signature says more.
Plain = Annotated[float | int | bool | str, PlainValidator(_plain)]

Remat = Literal["none", "matmuls", "attention", "layer"]
Attention = Literal["auto", "xla", "splash", "cudnn"]


class Section(BaseModel):
    """A frozen table of keys. Unknown keys, wrong types and NaN are errors."""

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
        """Reads "none" as None where a key may be None: TOML has no null."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        return None if value == "none" and type(None) in typing.get_args(annotation) else value

    def _contradictions(self) -> Iterator[str]:
        """Yields one line for each set of keys that cannot hold together, with the fix."""
        yield from ()

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if found := list(self._contradictions()):
            raise ValueError("\n".join(found))
        return self


class OpenSection(Section):
    """A table with further keys: keyword arguments of a function, whose signature checks them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Plain] = Field(init=False)

    @property
    def parameters(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.__pydantic_extra__)
