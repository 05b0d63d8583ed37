"""Files of a checkpoint directory: JSON objects and safetensors.

Checkpoints come from strangers. Damaged files, files of the wrong type, Git LFS pointers and
pickles raise a ValueError that names the file.
"""

import contextlib
import json
import math
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
import pydantic
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.core.precision import DType
from jaxrl.models.spec import ParamSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PICKLES = ("pytorch_model*.bin", "adapter_model.bin", "consolidated*.pth", "*.ckpt")


class Table(pydantic.BaseModel):
    """A JSON object: types and bounds of the keys that jaxrl reads. Other keys are ignored."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


T = TypeVar("T", bound=Table)


class _Index(Table):
    weight_map: dict[str, str]


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file; raises OSError if it cannot be written, as on a full disk."""
    try:
        # transformers rejects files without this metadata.
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def excerpt(value: Any) -> str:
    """Returns the `repr` of a value from a file, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def validated(schema: type[T], raw: Mapping[str, Any]) -> T:
    """Reads a JSON object by its schema.

    Raises:
      ValueError: for a missing key or a value of the wrong type or out of bounds; the message names
        the key.
    """
    try:
        return schema.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{key} is missing") from None
        problem = first["msg"].replace("Input should be", "expected", 1)
        if first["type"] == "model_type":
            problem = "expected an object with keys"
        raise ValueError(f"{key}={excerpt(first['input'])}: {problem}") from None


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Puts the file's path in front of errors about its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_file(path: Path) -> None:
    """Checks that a file exists and is not a Git LFS pointer.

    Raises:
      FileNotFoundError, ValueError: if not.
    """
    if not path.is_file():
        problem = "is not a regular file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}")
    with path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` where the "
                "checkpoint was cloned, or download it with `hf download`"
            )


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises as `check_file`, and for other content."""
    check_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {excerpt(content)}; expected an object with keys")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object with a line for each key."""
    path.write_text(json.dumps(content, indent=2) + "\n")


class Tensor(Protocol):
    """A tensor of a checkpoint, read on demand."""

    @property
    def path(self) -> Path:
        """The tensor's file."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the array that `read` returns."""
        ...

    def read(self, *, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Reads the tensor; raises ValueError if it has another shape or is not readable."""
        ...


class StoredTensor(NamedTuple):
    """A tensor of an open safetensors file, read on demand."""

    path: Path
    name: str
    file: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """Safetensors' name of the dtype, such as "BF16"."""
        return self.file.get_slice(self.name).get_dtype()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor; 0 in a dtype that `read` refuses."""
        dtype = _DTYPES.get(self.dtype)
        return 0 if dtype is None else np.dtype(dtype).itemsize * math.prod(self.shape)

    def read(
        self,
        *,
        shape: tuple[int, ...] | None = None,
        part: tuple[slice, ...] | None = None,
        dtypes: Collection[str] = tuple(_DTYPES),
    ) -> np.ndarray:
        """Reads the tensor, or a part of it.

        Raises:
          ValueError: if its whole shape is not `shape`, or its dtype is not one of `dtypes`, by
            default the floating-point ones.
        """
        found, dtype = self.shape, self.dtype
        if shape not in (None, found):
            raise ValueError(
                f"{self.path}: tensor {self.name!r} has shape {found}, expected {shape}"
            )
        if dtype not in dtypes:
            raise ValueError(
                f"{self.path}: tensor {self.name!r} has dtype {dtype}; supported are "
                f"{', '.join(dtypes)}"
            )
        if part is not None:
            return self.file.get_slice(self.name)[part]
        return self.file.get_tensor(self.name)


def byte_starts(path: Path) -> dict[str, int]:
    """Returns the offset of each tensor in a readable safetensors file, in bytes. Tensors of a type
    that numpy lacks are read from there."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + one["data_offsets"][0] for name, one in header.items()}


def open_tensors(paths: Iterable[Path], stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """Opens safetensors files until the stack is closed; returns {name: tensor}.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is unreadable, or two files hold a tensor of the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        check_file(path)
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 — not a dict
            if name in tensors:
                raise ValueError(f"{path}: tensor {name!r} is also in {tensors[name].path}")
            tensors[name] = StoredTensor(path, name, file)
    return tensors


def open_weights(directory: Path, stack: contextlib.ExitStack) -> dict[str, StoredTensor]:
    """Opens model.safetensors, or the files that its index names, as `open_tensors`.

    Raises:
      FileNotFoundError, ValueError: also for an index that contradicts the files.
    """
    weight_map = read_index(directory)
    tensors = open_tensors(weight_files(directory, weight_map), stack)
    for name in weight_map:
        if name not in tensors:
            raise ValueError(f"{directory / INDEX} names tensor {name!r}, which no file contains")
    return tensors


def weight_files(directory: Path, weight_map: Mapping[str, str]) -> list[Path]:
    """Lists the files of weights that a `read_index` names, or model.safetensors if it is empty."""
    return [directory / name for name in sorted(set(weight_map.values())) or [SINGLE]]


def read_index(directory: Path) -> dict[str, str]:
    """Returns the name of each tensor's file in the index; {} if there is only model.safetensors.

    Raises:
      ValueError: for an index that contradicts the files, or pickled weights alone.
    """
    single, index = directory / SINGLE, directory / INDEX
    if not index.exists():
        if not single.exists():
            refuse_pickles(directory)
        return {}
    raw = read_object(index)
    with named(index):
        weight_map = validated(_Index, raw).weight_map
    names = sorted(set(weight_map.values()))
    for name in names:
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(
                f"{index}: weight_map names the file {name!r}; expected one inside the directory"
            )
    if single.exists() and SINGLE not in names:
        raise ValueError(
            f"{directory} has both {SINGLE} and {INDEX}, which names other files; transformers "
            "reads the first and vLLM the second; delete the one that is out of date"
        )
    return weight_map


def refuse_pickles(directory: Path) -> None:
    """Raises ValueError if a directory without safetensors has pickled weights."""
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ValueError(
            f"{directory} has only pickled weights ({pickles[0]}), which can run code when they "
            "are loaded; convert them to safetensors where you trust them, with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(...)"
        )


def finite_cast(value: np.ndarray, dtype: DType, *, name: str) -> np.ndarray:
    """Casts to `dtype`; raises ValueError, which begins with `name`, if a finite value becomes
    infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        out = value.astype(dtype, copy=False)
    # numpy reports no overflow of casts from and to bf16, which has the range of f32.
    if jnp.finfo(out.dtype).maxexp < jnp.finfo(value.dtype).maxexp and (
        np.count_nonzero(np.isinf(out)) > np.count_nonzero(np.isinf(value))
    ):
        raise ValueError(f"{name} has values that are infinite in {out.dtype}")
    return out


def read_parameter(
    one: ParamSpec, tensors: Mapping[str, Tensor], *, dtype: DType | None
) -> np.ndarray:
    """Reads and stacks the tensors of a parameter, cast to `dtype`; None keeps the files', or the
    wider one where they differ. Raises as `Tensor.read`."""
    names = one.hf_names()
    out: np.ndarray | None = None
    for i, name in enumerate(names):
        part = tensors[name].read(shape=one.tensor_shape)
        if out is None:
            out = np.empty((len(names), *one.shape[one.stacked :]), dtype or part.dtype)
        if dtype is None:
            out = out.astype(jnp.promote_types(out.dtype, part.dtype), copy=False)
        where = f"{tensors[name].path}: tensor {name!r}"
        out[i] = finite_cast(one.swap(part), out.dtype, name=where)
    assert out is not None  # a decoder has at least one layer
    return out.reshape(one.shape)
