"""Answers in the form of the wire."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic
import pydantic_core
from tinker.proto import tinker_public_pb2 as proto
from tinker.types._pydantic_types.save_weights_external_response import (
    SaveWeightsExternalResponseInternal as Exported,
)
from tinker.types._pydantic_types.save_weights_for_sampler_response import (
    SaveWeightsForSamplerResponseInternal as Published,
)

from jaxrl.diagnostics import moments
from jaxrl.service.pool import Scored
from jaxrl.service.sampling import Answer, Request
from jaxrl.service.scoring import Top
from jaxrl.service.wire import Batch, write_output

__all__ = ["Exported", "Published", "encode", "failure", "output", "samples"]


def encode(response: pydantic.BaseModel) -> bytes:
    """Encodes one of the client's own types as JSON, which has no Infinity and NaN: they are texts,
    from which the client makes numbers again. The norm of gradients that overflow is one."""
    return pydantic_core.to_json(response.model_dump(), inf_nan_mode="strings")


def failure(error: Exception, *, user: bool) -> bytes:
    """Encodes the error of a request; `user` errors are not worth a retry."""
    text = str(error) if user else f"{type(error).__name__}: {error}"
    return _json({"error": text, "category": "user" if user else "server"})


def output(batch: Batch, scored: Scored, *, metrics: Mapping[str, float]) -> bytes:
    """Encodes the results of a forward_backward request, with its metrics."""
    flat = [one.flat for one in batch.data]
    return write_output(scored.logprobs, flat=flat, metrics=metrics)


def metrics(batch: Batch, scored: Scored) -> dict[str, float]:
    """Computes a request's metrics; the end of a name says how parts of one are combined.

    "loss:sum"; with the sampler's log-probs q also, as `losses.mismatch` defines them, over tokens
    whose advantage or log q is not 0: "mismatch/kl:mean", "mismatch/k3_kl:mean" in nats and
    "mismatch/token_mult_error:mean", and "ratio:max". With a shadow s also mean and standard
    deviation of alpha = log s - log q, "probe/alpha:mean" and "probe/alpha_std:mean", and of beta =
    log p - log s, all in nats.
    """
    found = {"loss:sum": float(sum(x.sum(dtype=np.float64) for x in scored.losses))}
    found |= scored.metrics
    if "logprobs" not in batch.data[0].arrays:
        return found
    learner, sampler, used = [], [], []
    for one, logprobs in zip(batch.data, scored.logprobs, strict=True):
        arrays = one.arrays
        learner.append(logprobs.ravel())
        sampler.append(arrays["logprobs"].ravel())
        used.append(((arrays["logprobs"] != 0) | (arrays["advantages"] != 0)).ravel())
    mask = np.concatenate(used)
    p, q = (np.concatenate(x)[mask].astype(np.float64) for x in (learner, sampler))
    if not p.size:
        return found
    if scored.shadow:
        s = np.concatenate([x.ravel() for x in scored.shadow])[mask].astype(np.float64)
        parts = moments("probe/alpha", s - q) | moments("probe/beta", p - s)
        names = ("probe/alpha", "probe/alpha_std", "probe/beta", "probe/beta_std")
        found |= {f"{name}:mean": parts[name] for name in names}
    delta = np.clip(p - q, -20, 20)
    return found | {
        "mismatch/kl:mean": float(np.mean(-delta)),
        "mismatch/k3_kl:mean": float(np.mean(np.exp(delta) - delta - 1)),
        "mismatch/token_mult_error:mean": float(np.mean(np.exp(np.abs(delta)))),
        "ratio:max": float(np.exp(delta.max())),
    }


def samples(request: Request, answer: Answer) -> bytes:
    """Encodes the samples of a request and the scores of its prompt."""
    message = proto.SampleResponse()
    for index, one in enumerate(answer.samples):
        found = message.sequences.add(
            stop_reason=proto.STOP_REASON_STOP
            if one.finish_reason == "stop"
            else proto.STOP_REASON_LENGTH,
            tokens=one.tokens.astype(np.int32).tobytes(),
            logprobs=one.logprobs.astype(np.float32).tobytes(),
        )
        if answer.top:
            _write_top(found.topk_sampled_logprobs, answer.top[index])
    scores = answer.scores
    if scores is None:
        return message.SerializeToString()
    if request.prompt_logprobs:
        message.prompt_logprobs = scores.logprobs.tobytes()
    if scores.top is not None:
        _write_top(message.topk_prompt_logprobs, scores.top)
    if scores.targets is not None:
        _write_targets(message.target_prompt_logprobs, scores.targets, request)
    if scores.draws is not None:
        ids, values = scores.draws
        _write_dense(message.prompt_alt_tokens.tokens, ids.astype(np.int64))
        _write_dense(message.prompt_alt_tokens.logprobs, values)
    return message.SerializeToString()


def _write_top(message: Any, top: Top) -> None:
    ids, values = top
    message.token_ids = ids.astype(np.int32).tobytes()
    message.logprobs = values.astype(np.float32).tobytes()
    message.length, message.k = ids.shape


def _write_dense(message: Any, values: np.ndarray) -> None:
    wide = values.dtype == np.int64
    message.dtype = proto.DTYPE_INT64 if wide else proto.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    message.dense = (values if wide else values.astype(np.float32)).tobytes()


def _write_targets(message: Any, values: np.ndarray, request: Request) -> None:
    """Writes log-probs in the layout of the ids that the request named."""
    layout = request.sparse
    if layout is None:
        return _write_dense(message, values)
    crow, columns = (np.asarray(part, np.int64) for part in layout)
    rows = np.repeat(np.arange(len(values)), np.diff(crow))
    message.dtype = proto.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    message.sparse_csr.values = values[rows, columns].astype(np.float32).tobytes()
    message.sparse_csr.crow_indices = crow.tobytes()
    message.sparse_csr.col_indices = columns.tobytes()
    return None


def _json(content: dict[str, Any]) -> bytes:
    return pydantic.TypeAdapter(dict[str, Any]).dump_json(content)
