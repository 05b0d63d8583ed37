"""Requests that wait their turn: their bodies, as written to disk, and what is to be done."""

import json
import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from jaxrl.service.sampling import BASE, Request
from jaxrl.service.scoring import Asked
from jaxrl.service.uploaded.graph import Graph
from jaxrl.service.wire import MOST_TARGETS, RefusedError, check_tokens, dense, read_batch

TRAINING = ("create", "load", "compute", "step", "save", "external", "publish")
"""Kinds of requests that a model computes in the order of their sequence numbers."""


# A name of its own for a directory: not "..", and without the colons that file names have not; and
# for an address, into which the client writes it as it is: "a?b" would name the checkpoint "a".
_NAME = re.compile(r"[^/:.?#%\x00-\x1f][^/:?#%\x00-\x1f]*")
_LONGEST_NAME = 200  # bytes
_TTL = (3600, 10 * 366 * 86400)
_MOST_SAMPLES = 4096  # of one request


class Work(NamedTuple):
    """An accepted request. `payload` is what `decode` returns."""

    id: str
    kind: str
    target: str  # a model's id, or a sampler's
    seq: int
    payload: Any


class Limits(NamedTuple):
    """The model's limits, which inputs are checked against, and uploaded losses by their ids."""

    vocab_size: int
    max_positions: int
    uploaded: Callable[[str], Graph]


def decode(kind: str, body: bytes, limits: Limits) -> Any:
    """Reads the body of a request and checks it.

    Returns:
      "compute": a `wire.Batch`; "step": AdamW's settings by name; "sample": a `sampling.Request`
      without its weights; the others: the client's own request.

    Raises:
      ValueError: for a request that cannot be served; the message names the part.
    """
    if kind == "compute":
        return read_batch(proto.ForwardBackwardRequest.FromString(body), **limits._asdict())
    content = json.loads(body)
    if kind == "step":
        return _read_step(types.OptimStepRequest.model_validate(content))
    if kind == "sample":
        return _read_sample(types.SampleRequest.model_validate(content), limits)
    schema: Any = {
        "create": types.CreateModelRequest,
        "load": types.LoadWeightsRequest,
        "save": types.SaveWeightsRequest,
        "external": types.SaveWeightsExternalRequest,
        "publish": types.SaveWeightsForSamplerRequest,
    }[kind]
    found = schema.model_validate(content)
    if kind == "external" and found.age_encryption_recipients:
        raise RefusedError("age_encryption_recipients: files are not encrypted; leave it out")
    if kind in ("save", "external", "publish"):
        _check_name(found.path)
        check_ttl(found.ttl_seconds)
    return found


def check_ttl(seconds: Any) -> None:
    """Raises RefusedError for a checkpoint's time that is not a whole number in range, or None."""
    if seconds is not None and not (type(seconds) is int and _TTL[0] <= seconds <= _TTL[1]):
        raise RefusedError(
            f"ttl_seconds = {seconds!r:.80}: it must be an hour to ten years, or absent"
        )


def _check_name(name: str | None) -> None:
    """Raises RefusedError for a name under which no checkpoint can be written beside others."""
    if name and not (_NAME.fullmatch(name) and len(name.encode()) <= _LONGEST_NAME):
        raise RefusedError(
            f"the checkpoint's name {name!r:.80} must not begin with a dot, hold any of / : ? # % "
            f"or a control character, or be longer than {_LONGEST_NAME} bytes; choose another"
        )


def with_seed(content: dict[str, Any]) -> dict[str, Any]:
    """Chooses the seed of a request for samples that names none, so that a restarted server draws
    the same ones."""
    params = content.get("sampling_params", {})
    if not isinstance(params, dict):
        raise RefusedError(f"sampling_params = {params!r:.80}: they must be an object")
    params = dict(params)
    if params.get("seed") is None:
        params["seed"] = secrets.randbelow(2**31)
    return {**content, "sampling_params": params}


def _read_step(request: types.OptimStepRequest) -> dict[str, float]:
    params = request.optim_params
    if not isinstance(params, types.AdamParams):
        raise RefusedError(f"the optimizer {params.type!r} is not supported; use AdamParams")
    settings = params.model_dump()
    ranges = {
        "learning_rate": settings["learning_rate"] >= 0,
        "beta1": 0 <= settings["beta1"] < 1,
        "beta2": 0 <= settings["beta2"] < 1,
        "eps": settings["eps"] > 0,
        "weight_decay": settings["weight_decay"] >= 0,
        "grad_clip_norm": settings["grad_clip_norm"] >= 0,
    }
    for name, valid in ranges.items():
        if not (valid and np.isfinite(settings[name])):
            raise RefusedError(f"adam_params: {name} = {settings[name]!r} is out of its range")
    return settings


def _read_sample(request: types.SampleRequest, limits: Limits) -> Request:
    if request.record_stability_info:
        raise RefusedError("record_stability_info: stable_reinforce is not supported; leave it out")
    for index, chunk in enumerate(request.prompt.chunks):
        if chunk.type != "encoded_text":
            raise RefusedError(f"prompt: chunk {index} is {chunk.type}; only tokens are supported")
    prompt = np.asarray(request.prompt.to_ints(), np.int64)
    check_tokens(prompt, "prompt", vocab_size=limits.vocab_size)
    room = limits.max_positions - len(prompt)
    if not len(prompt) or room < 1:
        raise RefusedError(
            f"prompt has {len(prompt)} tokens; with one more the model takes at most "
            f"{limits.max_positions}, and it needs at least one"
        )
    params = request.sampling_params
    stop: Any = params.stop
    stop = (stop,) if isinstance(stop, str) else None if stop is None else tuple(stop)
    if stop and isinstance(stop[0], str):
        if "" in stop:
            raise RefusedError(f"stop = {list(stop)!r:.80}: a text must not be empty; [] is none")
    elif stop:
        check_tokens(np.asarray(stop, np.int64), "stop", vocab_size=limits.vocab_size)
    if not 1 <= request.num_samples <= _MOST_SAMPLES:
        raise RefusedError(
            f"num_samples = {request.num_samples}: it must be 1 to {_MOST_SAMPLES}; ask for more "
            "in several requests"
        )
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RefusedError(f"max_tokens = {params.max_tokens}: it must be at least 1")
    for name, valid, expected in (
        ("temperature", 0 <= params.temperature < np.inf, "a finite number of at least 0"),
        ("top_p", 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k >= -1, "at least 1, or -1 or 0 for no limit"),
    ):
        if not valid:
            raise RefusedError(f"{name} = {getattr(params, name)}: it must be {expected}")
    return Request(
        weights=BASE,
        prompt=prompt.astype(np.int32),
        count=request.num_samples,
        max_tokens=min(params.max_tokens or room, room),
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=min(params.top_k, limits.vocab_size),
        stop=stop,
        seed=int(params.seed or 0),
        prompt_logprobs=bool(request.prompt_logprobs),
        last=_last(request, len(prompt)),
        asked=_asked(request, len(prompt), limits),
        sparse=_layout(request),
        top=_count(request, "topk_sample_logprobs", limits.vocab_size),
    )


def _asked(request: types.SampleRequest, size: int, limits: Limits) -> Asked:
    """Reads which scores of the prompt are asked for."""
    params = request.sampling_params
    targets = None
    if request.target_prompt_logprobs is not None:
        targets = _dense_targets(request.target_prompt_logprobs, rows=size - 1, limits=limits)
        if targets.ndim != 2 or len(targets) != size - 1 or not np.any(targets >= 0):
            raise RefusedError(
                f"target_prompt_logprobs has shape {list(targets.shape)}; it must name a "
                f"token, and have {size - 1} rows, one for each token of the prompt after the first"
            )
        check_tokens(targets[targets != -1], "target_prompt_logprobs", vocab_size=limits.vocab_size)
    return Asked(
        top=_count(request, "topk_prompt_logprobs", limits.vocab_size),
        targets=targets,
        draws=_count(request, "prompt_alt_tokens_k", limits.vocab_size),
        temperature=float(params.temperature),
        seed=int(params.seed or 0),
    )


def _dense_targets(tensor: Any, *, rows: int, limits: Limits) -> np.ndarray:
    """Returns token ids as a dense array; entries that a sparse one leaves out are -1."""
    shape = tuple(tensor.shape or (len(tensor.data),))
    try:
        values = np.asarray(tensor.data, np.int32)
        if tensor.sparse_crow_indices is None:
            return values.reshape(shape)
        crow, columns = (
            np.asarray(x, np.int64) for x in (tensor.sparse_crow_indices, tensor.sparse_col_indices)
        )
        most = (rows, min(limits.vocab_size, MOST_TARGETS // max(1, rows)))
        return dense(values, crow, columns, shape=shape, most=most, fill=-1)
    except (ValueError, IndexError, OverflowError) as error:
        raise RefusedError(f"target_prompt_logprobs does not fit {list(shape)}: {error}") from None


def _layout(request: types.SampleRequest) -> tuple[Any, Any] | None:
    tensor = request.target_prompt_logprobs
    if tensor is None or tensor.sparse_crow_indices is None:
        return None
    return tensor.sparse_crow_indices, tensor.sparse_col_indices


def _count(request: types.SampleRequest, name: str, most: int) -> int:
    value = getattr(request, name)
    if not 0 <= value <= most:
        raise RefusedError(f"{name} = {value}; it must be 0 to {most}")
    return value


def _last(request: types.SampleRequest, size: int) -> int | None:
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 0 < last < size):
        raise RefusedError(
            f"prompt_logprobs_last_n = {last}: it needs prompt_logprobs and must be 1 to {size - 1}"
        )
    return last
