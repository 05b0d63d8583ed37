"""The requests and answers of forward_backward: protobuf on the wire, arrays inside."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as proto

from jaxrl.core import nearest
from jaxrl.losses import recipes
from jaxrl.service.losses import LOSSES, NOT_HERE, OURS, Loss, find, named
from jaxrl.service.uploaded.graph import Graph
from jaxrl.service.uploaded.program import Prepared, prepare


class RefusedError(ValueError):
    """The request cannot be served as it is; the message names the part and the remedy."""


@dataclasses.dataclass(frozen=True)
class Datum:
    """One training example.

    Attributes:
      tokens: i32[N], the model's input.
      targets: i32[N, K], scored after the input up to and with the same position.
      arrays: f32[N, K] each, the loss's inputs and settings; an uploaded loss's have their ranks.
      flat: true if the client's arrays are [N].
    """

    tokens: np.ndarray
    targets: np.ndarray
    arrays: Mapping[str, np.ndarray]
    flat: bool


@dataclasses.dataclass(frozen=True)
class Batch:
    """The data of a forward or forward_backward request. `own` is the loss, if uploaded; `shadow`
    asks for the log-probs in the sampler's dtypes, too."""

    data: Sequence[Datum]
    loss: str
    forward_only: bool
    own: Prepared | None = None
    shadow: bool = False


MOST_TARGETS = 1 << 26  # of a sparse array, which may claim any shape

UPLOADED = "custom"
"""The client's name of every uploaded loss."""

SHADOW = "jaxrl.shadow"
"""The setting that asks for the parts alpha and beta of the mismatch, for any loss that reads the
sampler's log-probs."""


def read_batch(
    message: proto.ForwardBackwardRequest,
    *,
    vocab_size: int,
    max_positions: int,
    uploaded: Callable[[str], Graph],
) -> Batch:
    """Decodes and checks a request. The programs of an uploaded loss are compiled, so that the
    thread of the devices does not wait for them.

    Raises:
      ValueError: for an uploaded loss that takes too much memory with these data.
      RefusedError: for a loss that the service does not have, a setting or an array that the loss
        does not read, one that is missing, or a datum of a wrong shape, dtype or length.
    """
    graph, shadow = None, False
    if message.loss_fn == UPLOADED:
        graph, name = uploaded(_uploaded_id(message)), UPLOADED
        read = functools.partial(_read_inputs, graph=graph)
    else:
        loss, name, settings = read_loss(message)
        shadow = _read_shadow(message, loss)
        read = functools.partial(_read_arrays, loss=loss, settings=settings)
    if not message.data:
        raise RefusedError("data: there is no datum; give at least one")
    data = []
    for index, one in enumerate(message.data):
        try:
            tokens = read_chunks(one.model_input, vocab_size=vocab_size, longest=max_positions)
            targets = _read_targets(one, tokens, vocab_size=vocab_size)
            shaped = targets.reshape(len(tokens), -1).astype(np.int32)
            found = Datum(tokens, shaped, read(one, targets), targets.ndim == 1)
            if data and found.targets.shape[1] != data[0].targets.shape[1]:
                raise RefusedError(
                    f"target_tokens has {found.targets.shape[1]} targets per token, and datum 0 "
                    f"{data[0].targets.shape[1]}; send data with other numbers apart"
                )
            data.append(found)
        except RefusedError as error:
            raise RefusedError(f"datum {index}: {error}") from None
    own = None
    if graph is not None:
        counts = [len(one.tokens) for one in data]
        own = prepare(graph, counts, targets=data[0].targets.shape[1])
    return Batch(data, name, message.forward_only, own, shadow)


def _uploaded_id(message: proto.ForwardBackwardRequest) -> str:
    """Returns the id of an uploaded loss; raises RefusedError for one of another session."""
    found, session = str(_given(message).get("loss_id")), message.model_id.split(":train:")[0]
    if not found.startswith(f"{session}:loss:"):
        raise RefusedError(
            f"loss_fn_config: loss_id = {found!r} is no loss of {session}; create it in the "
            "model's own session with create_custom_loss"
        )
    return found


def read_loss(message: proto.ForwardBackwardRequest) -> tuple[Loss, str, dict[str, float]]:
    """Returns the loss, its name for `find`, and the settings that are arrays; raises RefusedError
    for what the service does not have."""
    name, given = message.loss_fn, _given(message)
    given.pop(SHADOW, None)
    if not name.startswith(OURS):
        loss = find_loss(name)
        return loss, name, read_settings(name, given, loss)
    try:
        if name.removeprefix(OURS) not in dir(recipes):
            raise ValueError(f"there are {', '.join(dir(recipes))}")
        text = named(name, given)
        return find(text), text, {}
    except ValueError as error:
        raise RefusedError(f"loss_fn = {name!r}: {error}") from None


def _read_shadow(message: proto.ForwardBackwardRequest, loss: Loss) -> bool:
    value = _given(message).get(SHADOW, 0.0)
    if value not in (0.0, 1.0):
        raise RefusedError(f"loss_fn_config: {SHADOW} = {value!r}; it must be 0 or 1")
    if value and "logprobs" not in loss.inputs:
        raise RefusedError(
            f"loss_fn_config: {SHADOW} splits the mismatch with the sampler, whose log-probs "
            f"{message.loss_fn} does not read; leave it out"
        )
    return bool(value)


def find_loss(name: str) -> Loss:
    """Returns a loss by its name; raises RefusedError for one that the service does not have."""
    if name in LOSSES:
        return LOSSES[name]
    if name in NOT_HERE:
        raise RefusedError(f"loss_fn = {name!r} is not supported: {NOT_HERE[name]}")
    near = nearest(name, LOSSES)
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(LOSSES)}"
    raise RefusedError(f"loss_fn = {name!r} is unknown; {hint}")


def _given(message: proto.ForwardBackwardRequest) -> dict[str, Any]:
    given: dict[str, Any] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        given[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return given


def read_settings(name: str, given: Mapping[str, Any], loss: Loss) -> dict[str, float]:
    """Reads `loss_fn_config`; settings that it leaves out have their defaults."""
    for key, value in given.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "no settings"
            raise RefusedError(f"loss_fn_config: {key!r} is unknown; {name} has {known}")
        if not isinstance(value, float) or not np.isfinite(value):
            raise RefusedError(f"loss_fn_config: {key} = {value!r}; it must be a finite number")
    return {**loss.settings, **given}


def read_chunks(chunks: Sequence[Any], *, vocab_size: int, longest: int) -> np.ndarray:
    """Joins the token ids of a model input, i32[N]; the chunks are protobuf's."""
    for index, chunk in enumerate(chunks):
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise RefusedError(f"model_input chunk {index} is {kind}; only tokens are supported")
    found = b"".join(chunk.encoded_text.tokens for chunk in chunks)
    if len(found) % 4:
        raise RefusedError("model_input: the tokens are not 32-bit integers")
    tokens = np.frombuffer(found, np.int32)
    check_tokens(tokens, "model_input", vocab_size=vocab_size)
    if not 0 < len(tokens) <= longest:
        raise RefusedError(f"model_input has {len(tokens)} tokens; the model takes 1 to {longest}")
    return tokens


def check_tokens(tokens: np.ndarray, name: str, *, vocab_size: int) -> None:
    """Raises RefusedError for token ids outside the vocabulary."""
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise RefusedError(
            f"{name} has token ids from {tokens.min()} to {tokens.max()}; the model's are 0 to "
            f"{vocab_size - 1}: use the model's own tokenizer"
        )


def _read_targets(message: proto.Datum, tokens: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """Reads the target tokens, i64[N] or i64[N, K]."""
    given = _given_tensor(message, "target_tokens")
    most = (len(tokens), min(vocab_size, MOST_TARGETS // len(tokens)))
    targets = _read_tensor(given, "target_tokens", dtype=np.dtype(np.int64), most=most)
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise RefusedError(
            f"target_tokens has shape {list(targets.shape)}; model_input has {len(tokens)} tokens, "
            f"so it must be [{len(tokens)}], or [{len(tokens)}, K]"
        )
    check_tokens(targets, "target_tokens", vocab_size=vocab_size)
    return targets


def _given_tensor(message: proto.Datum, name: str) -> proto.Tensor:
    if name not in message.loss_fn_inputs:
        raise RefusedError(f"loss_fn_inputs lacks {name!r}, which the loss reads")
    return message.loss_fn_inputs[name]


def _read_arrays(
    message: proto.Datum, targets: np.ndarray, *, loss: Loss, settings: Mapping[str, float]
) -> dict[str, np.ndarray]:
    known = ("target_tokens", *loss.inputs, *loss.per_token)
    for name in message.loss_fn_inputs:
        if name not in known:
            raise RefusedError(f"loss_fn_inputs has {name!r}; the loss reads {', '.join(known)}")
    if loss.single and targets.ndim > 1 and targets.shape[1] > 1:
        raise RefusedError(
            f"target_tokens has {targets.shape[1]} targets per token; this loss takes one"
        )
    arrays: dict[str, np.ndarray] = {}
    for name in (*loss.inputs, *loss.per_token):
        if name in loss.per_token and name not in message.loss_fn_inputs:
            continue
        value = _read_floats(_given_tensor(message, name), name, most=targets.shape)
        if value.shape != targets.shape:
            raise RefusedError(
                f"{name} has shape {list(value.shape)} and target_tokens {list(targets.shape)}; "
                "give one value per target"
            )
        arrays[name] = value.reshape(len(targets), -1)
    for name, number in settings.items():
        arrays.setdefault(name, np.full((len(targets), targets[0].size), number, np.float32))
    if loss.marks and not arrays[loss.marks].any():
        raise RefusedError(f"{loss.marks} marks no token; mark the sampled ones with 1")
    return arrays


def _read_inputs(
    message: proto.Datum, targets: np.ndarray, *, graph: Graph
) -> dict[str, np.ndarray]:
    """Reads the arrays of an uploaded loss; others that the datum has are left alone."""
    (_, rank), *inputs = graph.inputs
    if targets.ndim != rank:
        raise RefusedError(
            f"target_tokens has shape {list(targets.shape)}; the loss declared log-probs of rank "
            f"{rank}"
        )
    arrays = {}
    for name, rank in inputs:
        given = _given_tensor(message, name)
        value = _read_floats(given, name, most=targets.shape[:rank], dtypes="fi")
        if not (rank or given.shape) and value.size == 1:
            value = value.reshape(())
        if value.shape != targets.shape[:rank]:
            raise RefusedError(
                f"{name} has shape {list(value.shape)}; the loss declared rank {rank}, and "
                f"target_tokens has shape {list(targets.shape)}"
            )
        arrays[name] = value
    return arrays


def _read_floats(
    message: proto.Tensor, name: str, *, most: tuple[int, ...], dtypes: str = "f"
) -> np.ndarray:
    """Reads finite numbers as f32; `dtypes` may also be "fi", with integers."""
    own = _DTYPES.get(message.dtype)
    whole = own is not None and own.kind == "i" and "i" in dtypes
    dtype = np.dtype(np.int64 if whole else np.float32)
    value = _read_tensor(message, name, dtype=dtype, most=most).astype(np.float32)
    if not np.isfinite(value).all():
        raise RefusedError(f"{name} has values that are not finite")
    return value


_DTYPES = {
    proto.DTYPE_FLOAT32: np.dtype(np.float32),
    proto.DTYPE_INT64: np.dtype(np.int64),
    proto.DTYPE_INT32: np.dtype(np.int32),
}


def _read_tensor(
    message: proto.Tensor, name: str, *, dtype: np.dtype, most: tuple[int, ...]
) -> np.ndarray:
    """Decodes a dense array, or a sparse one (CSR) of at most this shape, with 0 elsewhere."""
    own = _DTYPES.get(message.dtype)
    if own is None or own.kind != dtype.kind:
        shown = proto.DType.Name(message.dtype).removeprefix("DTYPE_").lower()
        raise RefusedError(f"{name} has dtype {shown}; it must be {dtype}")
    shape = tuple(message.shape)
    try:
        if message.WhichOneof("encoding") != "sparse_csr":
            values = np.frombuffer(message.dense, own)
            return values.reshape(shape or (-1,)).astype(dtype)
        part = message.sparse_csr
        crow, columns = (np.frombuffer(x, np.int64) for x in (part.crow_indices, part.col_indices))
        values = np.frombuffer(part.values, own).astype(dtype)
        return dense(values, crow, columns, shape=shape, most=most, fill=0)
    except (ValueError, IndexError) as error:
        raise RefusedError(f"{name} does not fit its shape {list(shape)}: {error}") from None


def dense(
    values: np.ndarray,
    crow: np.ndarray,
    columns: np.ndarray,
    *,
    shape: tuple[int, ...],
    most: tuple[int, ...],
    fill: int,
) -> np.ndarray:
    """Returns a sparse array (CSR) as a dense one, with `fill` elsewhere.

    Raises:
      ValueError: for a shape beyond `most`, which a few bytes may claim, or rows that do not fit.
      IndexError: for a column outside of the shape.
    """
    if len(shape) != len(most) or any(not 0 < n <= m for n, m in zip(shape, most, strict=True)):
        raise ValueError(f"as the data has it, the array is at most {list(most)}")
    begins = len(crow) == shape[0] + 1 and crow[0] == 0
    if not begins or crow[-1] != len(values) or (np.diff(crow) < 0).any():
        raise ValueError(f"the {len(crow)} row pointers do not count {len(values)} values")
    if (columns < 0).any():  # numpy would count them from the end
        raise IndexError(f"index {columns.min()} is out of bounds: columns count from 0")
    found = np.full(shape, fill, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(crow)), columns] = values
    return found


def write_output(
    logprobs: Sequence[np.ndarray], *, flat: Sequence[bool], metrics: Mapping[str, float]
) -> bytes:
    """Encodes the answer to a forward_backward request.

    Args:
      logprobs: f32[N, K] for each datum.
      flat: true where the client expects [N].
      metrics: names with the way in which parts of a request are combined, such as "loss:sum".
    """
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    for values, single in zip(logprobs, flat, strict=True):
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        field = record.fields["logprobs"]
        field.data = values.astype(np.float32).tobytes()
        field.offsets = np.array([0, values.size * 4], np.int64).tobytes()
        field.dtype = proto.DTYPE_FLOAT32
        if not single:
            field.trailing_shape.append(values.shape[1])
    return message.SerializeToString()
