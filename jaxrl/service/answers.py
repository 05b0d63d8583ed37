"""Answers in the form of the wire."""

from typing import Any

import numpy as np
import pydantic
from tinker.proto import tinker_public_pb2 as proto
from tinker.types._pydantic_types.save_weights_for_sampler_response import (
    SaveWeightsForSamplerResponseInternal as Published,
)

from jaxrl.service.pool import Scored
from jaxrl.service.sampling import Answer
from jaxrl.service.wire import Batch, write_output

__all__ = ["Published", "encode", "failure", "output", "samples"]


def encode(response: pydantic.BaseModel) -> bytes:
    """Encodes one of the client's own types as JSON."""
    return response.model_dump_json().encode()


def failure(error: Exception, *, user: bool) -> bytes:
    """Encodes the error of a request; `user` errors are not worth a retry."""
    text = str(error) if user else f"{type(error).__name__}: {error}"
    return _json({"error": text, "category": "user" if user else "server"})


def output(batch: Batch, scored: Scored) -> bytes:
    """Encodes the results of a forward_backward request, with its metrics."""
    flat = [one.flat for one in batch.data]
    return write_output(scored.logprobs, flat=flat, metrics=metrics(batch, scored))


def metrics(batch: Batch, scored: Scored) -> dict[str, float]:
    """Computes a request's metrics; the end of a name says how parts of one are combined.

    "loss:sum"; with the sampler's log-probs q also, as `losses.mismatch` defines them, over tokens
    whose advantage or log q is not 0: "mismatch/kl:mean", "mismatch/k3_kl:mean" in nats and
    "mismatch/token_mult_error:mean", and "ratio:max".
    """
    found = {"loss:sum": float(sum(x.sum(dtype=np.float64) for x in scored.losses))}
    if "logprobs" not in batch.data[0].arrays:
        return found
    learner, sampler, used = [], [], []
    for one, logprobs in zip(batch.data, scored.logprobs, strict=True):
        arrays = one.arrays
        learner.append(logprobs.ravel())
        sampler.append(arrays["logprobs"].ravel())
        used.append(((arrays["logprobs"] != 0) | (arrays["advantages"] != 0)).ravel())
    mask = np.concatenate(used)
    delta = (np.concatenate(learner) - np.concatenate(sampler))[mask].astype(np.float64)
    if not delta.size:
        return found
    delta = np.clip(delta, -20, 20)
    return found | {
        "mismatch/kl:mean": float(np.mean(-delta)),
        "mismatch/k3_kl:mean": float(np.mean(np.exp(delta) - delta - 1)),
        "mismatch/token_mult_error:mean": float(np.mean(np.exp(np.abs(delta)))),
        "ratio:max": float(np.exp(delta.max())),
    }


def samples(answer: Answer) -> bytes:
    """Encodes samples and the scores of their prompt."""
    message = proto.SampleResponse()
    for one in answer.samples:
        message.sequences.add(
            stop_reason=proto.STOP_REASON_STOP
            if one.finish_reason == "stop"
            else proto.STOP_REASON_LENGTH,
            tokens=one.tokens.astype(np.int32).tobytes(),
            logprobs=one.logprobs.astype(np.float32).tobytes(),
        )
    if answer.logprobs is not None:
        message.prompt_logprobs = answer.logprobs.tobytes()
    if answer.top is not None:
        ids, values = answer.top
        message.topk_prompt_logprobs.token_ids = ids.tobytes()
        message.topk_prompt_logprobs.logprobs = values.tobytes()
        message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k = ids.shape
    return message.SerializeToString()


def _json(content: dict[str, Any]) -> bytes:
    return pydantic.TypeAdapter(dict[str, Any]).dump_json(content)
