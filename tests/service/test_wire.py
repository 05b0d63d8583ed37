"""Arrays on the wire."""

import json
import math

import numpy as np
import orjson
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from jaxrl.service import answers, requests, wire


def sparse(shape: list[int], crow: list[int], column: int = 1) -> proto.Datum:
    datum = proto.Datum()
    chunk = datum.model_input.add()
    chunk.encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    given = datum.loss_fn_inputs["target_tokens"]
    given.dtype = proto.DTYPE_INT64
    given.shape.extend(shape)
    given.sparse_csr.values = np.array([3], np.int64).tobytes()
    given.sparse_csr.col_indices = np.array([column], np.int64).tobytes()
    given.sparse_csr.crow_indices = np.array(crow, np.int64).tobytes()
    return datum


def read(datum: proto.Datum) -> wire.Batch:
    message = proto.ForwardBackwardRequest(loss_fn="cross_entropy", data=[datum])
    return wire.read_batch(message, vocab_size=9, max_positions=9, uploaded=lambda name: None)


@pytest.mark.parametrize(
    ("shape", "crow", "column", "match"),
    [
        ([100_000, 100_000], [0, 1, 1], 1, r"datum 0: target_tokens .*100000\].*at most \[2, 9\]"),
        ([2, 10**12], [0, 1, 1], 1, r"at most \[2, 9\]"),
        ([2, 4], [0, 10**12, 1], 1, "row pointers do not count 1 values"),
        ([2, 4], [1, 1, 1], 1, "row pointers do not count 1 values"),
        ([2, 4], [0, 1, 1], 4, "index 4 is out of bounds"),
        ([2, 4], [0, 1, 1], -1, "index -1 is out of bounds"),
        ([2, 4], [0, 1, 1], 3, "lacks 'weights'"),  # the array itself is right
    ],
)
def test_a_sparse_array_is_checked_before_it_takes_memory(shape, crow, column, match) -> None:
    with pytest.raises(wire.RefusedError, match=match):
        read(sparse(shape, crow, column))


@pytest.mark.parametrize(
    ("shape", "crow", "token", "match"),
    [
        ([100_000, 100_000], [0, 1, 1], 3, r"fit \[100000, 100000\]: .*at most \[1, 9\]"),
        ([1, 4], [0, 10**12], 3, "row pointers do not count 1 values"),
        ([1, 4], [0, 1], 10**12, r"fit \[1, 4\]: .*1000000000000"),
    ],
)
def test_sparse_targets_of_a_prompt_are_checked_before_they_take_memory(
    shape, crow, token, match
) -> None:
    targets = {"data": [token], "dtype": "int64", "shape": shape}
    targets |= {"sparse_crow_indices": crow, "sparse_col_indices": [1]}
    request = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1},
        "target_prompt_logprobs": targets,
        "base_model": "m",
    }
    limits = requests.Limits(vocab_size=9, max_positions=9, uploaded=lambda name: None)
    with pytest.raises(wire.RefusedError, match=match):
        requests.decode("sample", json.dumps(request).encode(), limits)


@pytest.mark.parametrize(
    ("loss", "value", "match"),
    [("cross_entropy", 1.0, "log-probs cross_entropy does not read"), ("ppo", 2.0, "be 0 or 1")],
)
def test_a_shadow_is_refused_where_there_is_nothing_to_divide(loss, value, match) -> None:
    settings = {wire.SHADOW: value}
    message = proto.ForwardBackwardRequest(loss_fn=loss, loss_fn_config=settings)
    with pytest.raises(wire.RefusedError, match=match):
        wire.read_batch(message, vocab_size=9, max_positions=9, uploaded=lambda name: None)


@pytest.mark.parametrize("kind", ["save", "publish"])
@pytest.mark.parametrize(
    "name", ["..", "a/b", "a:b", ".a.draft", "a\n", "a?b", "a#b", "a%2fb", "\u00e9" * 101]
)
def test_a_checkpoint_has_a_directory_of_its_own(kind, name) -> None:
    """The name ".." deleted all checkpoints of a model, and "a:b" lay where "a_b" does."""
    with pytest.raises(wire.RefusedError, match="name"):
        requests.decode(kind, json.dumps({"model_id": "m", "path": name}).encode(), None)
    for right in ("\u00e9" * 100, "step 10..final-1.5_x", None):
        body = json.dumps({"model_id": "m", "path": right}).encode()
        assert requests.decode(kind, body, None).path == right


def test_a_step_whose_gradients_overflow_has_an_answer_that_the_client_reads() -> None:
    step = types.OptimStepResponse(metrics={"grad_norm": math.inf, "skipped_steps": 1.0})
    read = types.OptimStepResponse.model_validate(orjson.loads(answers.encode(step)))
    assert read == step
