"""The base class of every config table, and the types that its keys share."""

import math
import typing
import urllib.parse
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

from jaxrl.config.bucket import check_run_dir
from jaxrl.config.docstrings import attribute_docstrings
from jaxrl.core import Precision

# TOML arrays arrive as lists, which strict mode would refuse for a tuple.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
ClipRange = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], NonNegativeFloat],
    Field(
        strict=False,
        description="[low, high]: tokens count as clipped below a ratio of 1 - low and above "
        "1 + high.",
    ),
]
Seed = Annotated[NonNegativeInt, Field(lt=2**63)]
Seconds = Annotated[PositiveFloat, Field(le=1e6)]  # threads and sockets refuse years

_OF_32_BITS = "a number of 32 bits is expected: 0, or from 1e-30 to 1e30"


def _plain(value: Any) -> Any:
    if not isinstance(value, float | int | str) or value != value:
        raise ValueError("numbers, texts and booleans only")
    _check_storable(value)
    if 1e30 < abs(value if isinstance(value, float) else 0) < math.inf:
        raise ValueError(_OF_32_BITS)
    return value


def _check_storable(value: Any) -> None:
    """Checks that TOML can hold a value, and that each text could name a file."""
    if isinstance(value, list | tuple):
        for member in value:
            _check_storable(member)
    elif isinstance(value, str):
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("a text of valid characters without NUL is expected")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number of at most 64 bits is expected")


# An argument of a function, whose signature says more.
Plain = Annotated[float | int | bool | str, PlainValidator(_plain)]

# A dtype policy; files hold its text.
DtypePolicy = Annotated[
    Precision, PlainValidator(Precision.of), PlainSerializer(lambda precision: precision.text)
]


def _variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table of keys is expected")
    _check_plain_tree(value)
    return value


def _check_plain_tree(value: Any) -> None:
    if isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            _check_plain_tree(member)
    else:
        _plain(value)


# Variables of a chat template.
TemplateKwargs = Annotated[dict[str, Any], PlainValidator(_variables)]

RunDir = Annotated[
    str,
    AfterValidator(check_run_dir),
    Field(
        description="Directory of checkpoints, metrics and the trained model (in `model`), or "
        "s3://BUCKET/PATH or gs://BUCKET/PATH; a run found there is resumed."
    ),
]
Remat = Annotated[
    Literal["none", "matmuls", "attention", "layer"],
    Field(
        description="Recomputation in the backward pass: `none`; `matmuls` recomputes everything "
        "except matrix products and attention, at almost no cost; `attention` everything except "
        "attention; `layer` whole layers, which takes the least memory."
    ),
]
Attention = Annotated[
    Literal["auto", "xla", "splash", "cudnn"],
    Field(
        description="Attention kernel: `xla` runs everywhere, `splash` on TPUs, `cudnn` on NVIDIA "
        "GPUs. `auto` takes the device's own kernel if it supports the model and the dtypes; the "
        "log names it."
    ),
]


class Section(BaseModel):
    """A frozen table of keys. Unknown keys, wrong types, NaN and empty texts are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Describes each key by the docstring below it."""
        texts = attribute_docstrings(cls.__module__).get(cls.__qualname__, {})
        for name in texts.keys() & cls.model_fields.keys():
            field = cls.model_fields[name]
            field.description = field.description or texts[name]

    @field_validator("*", mode="before")
    @classmethod
    def _none(cls, value: Any, info: ValidationInfo) -> Any:
        """Reads "none" as None where a key may be None: TOML has no null."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if value == "none" and type(None) in typing.get_args(annotation):
            return None
        _check_storable(value)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        """Refuses empty texts, and floats that are 0 or infinite in the learner's dtypes."""
        for member in value if isinstance(value, tuple) else [value]:
            if member == "":
                raise ValueError("the text is empty; leave the key out, or write a text")
            size = abs(member) if isinstance(member, float) else 1.0
            if 0 < size < 1e-30 or 1e30 < size < math.inf:
                raise ValueError(_OF_32_BITS)
        return value

    def _contradictions(self) -> Iterator[str]:
        """Yields one line for each set of keys that contradict each other, with the fix."""
        yield from ()

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if found := list(self._contradictions()):
            raise ValueError("\n".join(found))
        return self


def is_http_address(text: str) -> bool:
    """Tells if a text is the address of a server, such as http://HOST:8000."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of brackets, or of the port
        return False


class OpenSection(Section):
    """A table with further keys: keyword arguments of a function, whose signature checks them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Plain] = Field(init=False)  # pyrefly: ignore[bad-override]

    @property
    def parameters(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.__pydantic_extra__)
