"""Uploaded losses equal the traced function under torch, in values and derivatives."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from tinker.proto import tinker_public_pb2 as proto

from jaxrl.service.computing import find_graph, prepare_again
from jaxrl.service.requests import Limits, decode
from jaxrl.service.state import Store
from jaxrl.service.uploaded import program
from jaxrl.service.uploaded.graph import MOST_BYTES, read_graph
from jaxrl.service.uploaded.operations import OPERATIONS
from jaxrl.service.uploaded.program import check, evaluate, prepare

RANKS = {"logprobs": 1, "advantages": 1, "mask": 1, "beta": 0}
COUNTS = (2, 5, 9)

# Operations on x = log-probs, a = advantages, m = booleans, b = a positive number of the datum.
PARTS: list[Callable[..., Any]] = [
    lambda x, a, m, b: torch.abs(x) + abs(a),
    lambda x, a, m, b: torch.acos(x.exp() / 2) + torch.asin(x.exp() / 2) + torch.atan(x),
    lambda x, a, m, b: torch.ceil(a) * x + x.floor() * x + torch.round(a) * x + x.trunc() * x,
    lambda x, a, m, b: x.cos() + x.cosh() + x.sin() + torch.sinh(x) + torch.tan(x.exp()),
    lambda x, a, m, b: torch.erf(x) + F.gelu(x) + torch.special.expit(x) + F.silu(x),
    lambda x, a, m, b: torch.exp2(x) + x.expm1() + F.logsigmoid(x) + F.softplus(30 + 9 * x),
    lambda x, a, m, b: (-x).log() + x.neg().log10() + (-x).log1p() + (+x).square().log2(),
    lambda x, a, m, b: torch.reciprocal(x) + x.square().rsqrt() + (-x).sqrt() + x.sigmoid(),
    lambda x, a, m, b: F.relu(x + 1) + torch.sign(a) * x + x.tanh() + 1 / x,
    lambda x, a, m, b: torch.isfinite(x) * x + (x.isnan() | torch.isinf(x)).float() * x,
    lambda x, a, m, b: torch.clamp(x, -1.0, -0.5) + x.clamp_max(-0.7) + x.clamp_min(a) + x.clip(b),
    lambda x, a, m, b: torch.clamp(x * m, min=0.0) + (x * m).relu() + F.l1_loss(x * m, a * 0),
    lambda x, a, m, b: torch.div(x, a) + torch.divide(x, b) + a.true_divide(x) + (x - a) / 3,
    lambda x, a, m, b: (x == a) * x + (x >= a) * x + (x > a) * x + (x <= a) * x + (x < a) * x,
    lambda x, a, m, b: (x != a) * x + torch.logaddexp(x, a) + torch.max(x, a) + torch.min(x, a),
    lambda x, a, m, b: torch.maximum(x, x) + torch.minimum(x, a) + x.multiply(a) + x.mul(b),
    lambda x, a, m, b: x**2 + x.pow(3) + (-x) ** a + torch.pow(2.0, x) + (-x) ** 0.5 + x**30,
    lambda x, a, m, b: torch.subtract(x, a) - torch.sub(x, b) + torch.add(a, x),
    lambda x, a, m, b: F.huber_loss(x, a, delta=0.5, reduction="none") + F.huber_loss(x, a),
    lambda x, a, m, b: F.mse_loss(x, a, reduction="sum") + F.smooth_l1_loss(x, a, beta=0.7),
    lambda x, a, m, b: torch.where(m & (a > 0), x, 0.0) + x.masked_fill(~m, 2.0),
    lambda x, a, m, b: (torch.logical_and(m, a > 0) | torch.logical_not(m)) * x,
    lambda x, a, m, b: (torch.logical_xor(m, a > 0) ^ torch.logical_or(m, a > 1)) * x,
    lambda x, a, m, b: (m.all() | m.any()) * x + torch.amax(x) * a + x.amin() + x.max() + x.min(),
    lambda x, a, m, b: x.cumsum(0) + torch.cumsum(x.flip(0), dim=-1).exp() + torch.flip(x, [0]),
    lambda x, a, m, b: torch.dot(x, a) + torch.matmul(x, a) + x @ a + x.prod(),
    lambda x, a, m, b: (
        x.log_softmax(0) + F.softmax(x, dim=-1) + torch.logsumexp(x, 0, keepdim=True)
    ),
    lambda x, a, m, b: x.mean() + x.mean(0) + x.std(unbiased=False) + torch.var(x, dim=0) + x.std(),
    lambda x, a, m, b: m.bool() * x + x.clone().contiguous() + x.detach() * x + a.to(torch.float32),
    lambda x, a, m, b: a.int() * x + a.long() * x + x.numel() + x.shape[0] + x.size(0) * x,
    lambda x, a, m, b: torch.ones_like(x) * b + torch.zeros_like(x) + x[None, ..., None].squeeze(),
    lambda x, a, m, b: x.unsqueeze(-1).sum(-1) + x.unsqueeze(0).squeeze(0) + x[0] + x[-1] * a,
    lambda x, a, m, b: (
        (x[1:] - x[:-1]).square().sum() + x[1:-1].sum() + (x[1:] - x[:-1]).abs().log().sum()
    ),
    lambda x, a, m, b: (x * m).sum() / m.sum().clamp(min=1) + x.sum(dim=0, keepdim=True) + b.log(),
    lambda x, a, m, b: x[10:].sum() + x[2:-8].abs().sum() + x[:-30].exp().sum() + b,
]


def loss_of(*parts: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose terms are also its metrics."""

    def loss(logprobs, advantages, mask, beta):
        terms = [(part(logprobs, advantages, mask != 0, beta) * advantages).sum() for part in parts]
        return sum(terms[1:], terms[0]), {f"custom/{i}:sum": x for i, x in enumerate(terms)}

    return loss


def body_of(function: Callable[..., Any], ranks: dict[str, Any]) -> tuple[bytes, Any]:
    """The client's request, and the traced function."""
    handle = trace_loss(function, ranks, "session")
    request = types.CreateCustomLossRequest(
        session_id="session",
        custom_loss_seq_id=0,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=encode_graph(handle),
    )
    return request.model_dump_json(exclude_none=True).encode(), handle.graph


def random_data(seed: int, *shape: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    data = []
    for count in COUNTS:
        mask = rng.integers(0, 2, (count, *shape)).astype(np.float32)
        mask[0] = 1
        data.append(
            {
                "logprobs": -rng.uniform(0.2, 1.5, (count, *shape)).astype(np.float32),
                "advantages": rng.normal(0, 1, (count, *shape)).astype(np.float32),
                "mask": mask,
                "beta": np.float32(rng.uniform(0.5, 2)).reshape(()),
            }
        )
    return data


def compare(function: Callable[..., Any], ranks: dict[str, Any], data: Any) -> None:
    """The loss, its metrics and its derivatives are those of torch."""
    body, traced = body_of(function, ranks)
    graph = read_graph(body)
    check(graph)
    logprobs = [one["logprobs"].reshape(len(one["logprobs"]), -1) for one in data]
    counts, targets = [len(one) for one in logprobs], logprobs[0].shape[1]
    found = evaluate(prepare(graph, counts, targets=targets), logprobs, data)
    for place, one in enumerate(data):
        given = [torch.tensor(one[name].astype(np.float64)) for name in ranks]
        given[0].requires_grad_()
        loss, metrics = traced(*given)
        loss.backward()
        within = {"rtol": 2e-4, "atol": 2e-4}
        for name, value in metrics.items():
            np.testing.assert_allclose(found.metrics[name][place], float(value.detach()), **within)
        np.testing.assert_allclose(found.losses[place], float(loss.detach()), **within)
        slope = given[0].grad.numpy().reshape(found.slopes[place].shape)
        scale = max(1, np.abs(slope).max())
        np.testing.assert_allclose(found.slopes[place] / scale, slope / scale, atol=1e-4)


@pytest.mark.parametrize("place", range(0, len(PARTS), 6))
def test_operations_and_their_derivatives_are_torchs(place: int) -> None:
    compare(loss_of(*PARTS[place : place + 6]), RANKS, random_data(place))


def test_each_operation_is_compared() -> None:
    named = set()
    for part in PARTS:
        graph = json.loads(body_of(loss_of(part), RANKS)[0])["graph"]
        named |= {one["target"].split(".")[-1].removeprefix("special_") for one in graph["nodes"]}
    assert set(OPERATIONS) <= named


def random_loss(seed: int) -> Callable[..., Any]:
    """A composition of 12 operations, whose results stay within some units."""
    one: list[Callable[..., Any]] = [
        torch.exp,
        torch.tanh,
        torch.sigmoid,
        F.softplus,
        lambda x: x - x.mean(0),
        lambda x: x.log_softmax(0),
        lambda x: x.cumsum(0) / x.shape[0],
        lambda x: x / (1 + x.std(unbiased=False)),
        lambda x: x.flip(0),
        lambda x: torch.clamp(x, -1, 1),
    ]
    two: list[Callable[..., Any]] = [
        torch.minimum,
        torch.maximum,
        lambda x, y: torch.where(x > y, x * y, y),
        lambda x, y: x * y.detach(),
        lambda x, y: x - y,
        lambda x, y: x + y * (x * y).mean(),
    ]

    def loss(logprobs, advantages, mask, beta):
        rng = np.random.default_rng(seed)
        made = [logprobs, advantages, logprobs * mask]
        for _ in range(12):
            first, second = (made[i] for i in rng.integers(0, len(made), 2))
            if rng.random() < 0.5:
                made.append(one[rng.integers(len(one))](first).clamp(-9, 9))
            else:
                made.append(two[rng.integers(len(two))](first, second).clamp(-9, 9))
        total = (sum(made[4:], made[3]) * mask).sum() / mask.sum() * beta
        return total, {"custom/last:mean": made[-1].mean()}

    return loss


@pytest.mark.parametrize("seed", range(8))
def test_random_compositions_are_torchs(seed: int) -> None:
    compare(random_loss(seed), RANKS, random_data(seed))


def test_several_targets_per_token() -> None:
    ranks = {"logprobs": 2, "weights": 2, "advantages": 1, "beta": 0}

    def loss(logprobs, weights, advantages, beta):
        held = torch.softmax(weights, dim=-1)
        kl = (held * (torch.log(held) - logprobs.log_softmax(-1))).sum(-1)
        best = logprobs[:, 0] + logprobs[..., -1] + logprobs[:, 1:].sum(1)
        loss = (kl * advantages[:, None].squeeze(1) + beta * best / logprobs.shape[1]).sum()
        return loss, {"custom/kl:mean": kl.mean()}

    data = random_data(3, 4)
    for one in data:
        one |= {"weights": one["advantages"], "advantages": one["advantages"][:, 0]}
    compare(loss, ranks, data)
    with pytest.raises(ValueError, match="is empty"):
        prepare(read_graph(body_of(loss, ranks)[0]), [5], targets=1)
    with pytest.raises(ValueError, match=r"GiB for one datum; 1 is allowed"):
        prepare(read_graph(body_of(loss, ranks)[0]), [30000], targets=1000)

    def pairs(logprobs):
        return (logprobs[:, :, None] - logprobs[:, None]).square().sum(), {}

    refused("a table of targets by targets", body_of(pairs, {"logprobs": 2})[0])


def test_data_of_any_lengths_are_as_each_alone_in_programs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(logprobs, advantages):
        return (logprobs.exp() * advantages).sum() / logprobs.shape[0], {}

    graph = read_graph(body_of(loss, {"logprobs": 1, "advantages": 1})[0])
    monkeypatch.setattr(program, "_MOST_FLOATS", 2**13)  # four data of 512 tokens
    rng = np.random.default_rng(0)
    counts = [5, 300, 64, 400, 2, 290, 310, 70, 500, 512]
    logprobs = [-rng.uniform(0.2, 1.5, (count, 1)).astype(np.float32) for count in counts]
    arrays = [{"advantages": rng.normal(0, 1, n).astype(np.float32)} for n in counts]
    prepared = prepare(graph, counts, targets=1)
    singles = [prepare(graph, [count], targets=1) for count in counts]
    assert all(part.rows * part.length * 3 <= 2**13 for part in prepared.parts)
    monkeypatch.setattr(program, "_compiled", pytest.fail)  # whatever other requests need by now
    together = evaluate(prepared, logprobs, arrays)
    for place, alone in enumerate(singles):
        expected = evaluate(alone, logprobs[place : place + 1], arrays[place : place + 1])
        np.testing.assert_array_equal(together.losses[place], expected.losses[0])
        np.testing.assert_array_equal(together.slopes[place], expected.slopes[0])


def test_a_restarted_service_compiles_before_it_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(logprobs):
        return -logprobs.sum(), {}

    body, _ = body_of(loss, {"logprobs": 1})
    store = Store(tmp_path / "state.sqlite")
    row = {"target": "s", "seq": 0, "owner": "o", "created": 0.0}
    store.insert("requests", id="session:loss:0", kind="loss", status="done", body=body, **row)
    request = proto.ForwardBackwardRequest(model_id="session:train:0", loss_fn="custom")
    request.loss_fn_config_v2["loss_id"].text = "session:loss:0"
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.full(9, 5, np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = proto.DTYPE_INT64, np.full(9, 6).tobytes()
    targets.shape.append(9)
    row["target"] = "session:train:0"
    store.insert(
        "requests",
        id="session:train:0:1",
        kind="compute",
        status="done",
        body=request.SerializeToString(),
        **row,
    )
    limits = Limits(64, 64, functools.partial(find_graph, store))
    prepare_again(store, "session:train:0", limits)
    monkeypatch.setattr(program, "jit_forward", pytest.fail)
    batch = decode("compute", request.SerializeToString(), limits)
    assert evaluate(batch.own, [np.full((9, 1), -2.0, np.float32)], [{}]).losses == 18
    store.close()


def refused(match: str, body: bytes | str) -> None:
    with pytest.raises(ValueError, match=match):
        check(read_graph(body if isinstance(body, bytes) else body.encode()))


def graph_of(*nodes: dict[str, Any], inputs: Any = None) -> str:
    """A request with these nodes between the placeholders and an output that is the last node."""
    inputs = inputs or [{"name": "logprobs", "rank": 1}]
    first = [{"op": "placeholder", "name": x["name"], "target": x["name"]} for x in inputs]
    given = [{"op": "call_function", "args": [], **one} for one in nodes]
    result = {"tuple": [{"ref": given[-1]["name"] if given else "logprobs"}, {"dict": {}}]}
    last = {"op": "output", "name": "output", "target": "output", "args": [result]}
    graph = {"nodes": [*first, *given, last]}
    head = {"session_id": "s", "custom_loss_seq_id": 0, "name": "loss"}
    return json.dumps({**head, "inputs": inputs, "graph": graph})


X = {"ref": "logprobs"}


def node(target: str, *args: Any, name: str = "x", **more: Any) -> dict[str, Any]:
    return {"name": name, "target": target, "args": list(args), **more}


@pytest.mark.parametrize(
    ("match", "body"),
    [
        ("'torch.linalg.svd': this operation has no counterpart.*forward_backward_custom",
         graph_of(node("torch.linalg.svd", X))),
        ("'os.system': this operation has no counterpart", graph_of(node("os.system", "ls"))),
        ("'sumn': .*there is 'sum'", graph_of(node("sumn", X, op="call_method"))),
        ("a node of the kind call_module", graph_of(node("layer", X, op="call_module"))),
        ("a node of the kind get_attr", graph_of(node("weights", op="get_attr"))),
        ("no earlier node", graph_of(node("torch.exp", {"ref": "y"}), node("torch.exp", name="y"))),
        ("no earlier node", graph_of(node("torch.exp", {"ref": "x"}))),
        ("an earlier node has the name", graph_of(node("torch.exp", X, name="logprobs"))),
        ("the loss is .*without axes", graph_of(node("torch.exp", X))),
        ("tokens by tokens", graph_of(
            node("operator.getitem", X, {"tuple": [{"slice": [None, None, None]}, None]}),
            node("operator.mul", {"ref": "x"}, X, name="y"))),
        ("do not broadcast", graph_of(
            node("operator.getitem", X, {"slice": [1, None, None]}),
            node("operator.mul", {"ref": "x"}, X, name="y"))),
        ("a slice must have the form", graph_of(
            node("operator.getitem", X, {"slice": [None, 3, None]}))),
        ("along tokens: 0 or -1", graph_of(node("operator.getitem", X, 3))),
        ("use torch.where", graph_of(node("operator.getitem", X, X))),
        ("it takes booleans", graph_of(node("torch.where", X, X, X))),
        ("does not fit the shape", graph_of(node("torch.sum", X, 1))),
        ("use amax", graph_of(node("torch.max", X, 0))),
        ("32 bits", graph_of(node("operator.pow", X, 10**40))),
        ("'out' has no counterpart", graph_of(node("torch.exp", X, kwargs={"out": X}))),
        ("'weight' has no counterpart", graph_of(
            node("torch.nn.functional.mse_loss", X, X, kwargs={"weight": X}))),
        ("the argument .* is in no form", graph_of(node("torch.exp", {"ref": "x", "tuple": []}))),
        ("256 are allowed", graph_of(*(node("torch.exp", X, name=f"n{i}") for i in range(400)))),
        ("bytes; 262144 are allowed", " " * (MOST_BYTES + 1)),
        ("recursion limit|Invalid JSON", '{"inputs":' + "[" * 100000),
        ("logprobs of rank 1 or 2", graph_of(inputs=[{"name": "old", "rank": 1}])),
        ("input of rank 2 needs", graph_of(
            inputs=[{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 2}])),
        ("placeholders are", graph_of(node("logprobs", op="placeholder"))),
    ],
)  # fmt: skip
def test_hostile_graphs_are_refused_by_the_name_of_the_node(match: str, body: str) -> None:
    refused(match, body)
