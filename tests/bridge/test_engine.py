"""vLLM serves exactly the published weights, and keeps the old ones after a refusal.

The engine runs here without its server, because it starts faster; `test_server` has the server.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import huggingface
from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import LearnerIdentity, PoisonedError, RefusedError
from jaxrl.bridge.manifest import Manifest
from jaxrl.bridge.shared_memory import SharedMemoryPublisher
from jaxrl.bridge.source import ParamsSource
from jaxrl.models.families import DecoderConfig
from jaxrl.models.model import decoder
from tests.bridge.cases import (
    CORRECTED,
    DTYPES,
    EXPERTS,
    FAMILIES,
    GPT_OSS,
    LEARNER,
    LINEAR,
    PAIRS,
    QWEN3,
    ListSource,
    params,
    write_payload,
)
from tests.bridge.engines import LINUX, ChildEngine, child_engine

pytestmark = LINUX
PROMPTS = [[5, 6, 7], [9, 3, 4, 8, 10, 77, 12], [100] * 20]


@pytest.fixture(scope="module")
def engine() -> Iterator[ChildEngine]:
    with child_engine() as running:
        yield running


def checkpoint(config: DecoderConfig, seed: int, directory: Path, dtype: np.dtype) -> Path:
    huggingface.save(directory, params(config, seed), config, dtype=dtype)
    return directory


@pytest.mark.parametrize(("family", "dtype"), PAIRS.items())
def test_outputs_equal_those_of_a_fresh_start(
    engine: ChildEngine, tmp_path: Path, family: str, dtype: str
) -> None:
    config, wire = FAMILIES[family], np.dtype(DTYPES[dtype])
    engine.open(checkpoint(config, 1, tmp_path / "new", wire), dtype)
    expected = engine.generate(PROMPTS)
    engine.open(checkpoint(config, 0, tmp_path / "old", wire), dtype)
    old = engine.generate(PROMPTS)
    assert old != expected
    specs = decoder(config).specs
    with SharedMemoryPublisher([engine], wire=wire, sampler=wire) as publisher:
        for version, (seed, outputs) in enumerate([(1, expected), (0, old), (1, expected)]):
            source = ParamsSource(params(config, seed), specs, dtype=wire)
            publisher.publish(source, version=version)
            assert engine.generate(PROMPTS) == outputs
            assert engine.call("version") == str(version)
    assert engine.call("loaded_modules") == []


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(EXPERTS, "bfloat16"), (CORRECTED, "bfloat16"), (GPT_OSS, "float16"), (LINEAR, "bfloat16")],
    ids=["qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next"],
)
def test_experts_are_exact(
    engine: ChildEngine, tmp_path: Path, config: DecoderConfig, dtype: str
) -> None:
    wire = np.dtype(DTYPES[dtype])
    engine.open(checkpoint(config, 1, tmp_path / "new", wire), dtype)
    expected = engine.generate(PROMPTS)
    old = checkpoint(config, 0, tmp_path / "old", wire)
    if config is LINEAR:  # never published
        file, more = old / "model.safetensors", {"mtp.norm.weight": np.ones(8, np.float32)}
        save_file(load_file(file) | more, file, metadata={"format": "pt"})
    engine.open(old, dtype)
    assert engine.generate(PROMPTS) != expected
    with SharedMemoryPublisher([engine], wire=wire, sampler=wire) as publisher:
        for version in range(2):
            source = ParamsSource(params(config, 1), decoder(config).specs, dtype=wire)
            publisher.publish(source, version=version)
            assert engine.generate(PROMPTS) == expected


@dataclasses.dataclass
class Serving:
    """An engine that serves version 5, and the next payload, ready to be corrupted."""

    engine: ChildEngine
    root: Path
    source: ParamsSource
    outputs: list

    def update(self, version: int = 6) -> None:
        self.engine.update("next", version=version, in_flight="keep")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a checkpoint like an old export: with a rotary buffer that is never published."""
    f32 = np.dtype(np.float32)
    found = checkpoint(QWEN3, 0, tmp_path_factory.mktemp("model"), f32)
    file = found / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    save_file(load_file(file) | buffer, file, metadata={"format": "pt"})
    huggingface.load(found, dtype=f32)
    return found


@pytest.fixture
def serving(engine: ChildEngine, model: Path, tmp_path: Path) -> Serving:
    f32 = np.dtype(np.float32)
    specs = decoder(QWEN3).specs
    root = tmp_path / "root"
    root.mkdir()
    if engine.model != model:
        engine.open(model, "float32")
    engine.call("disconnect")
    engine.connect(root=str(root), wire="float32", sampler="float32")
    source = ParamsSource(params(QWEN3, 0), specs, dtype=f32)
    write_payload(source, root / "now", version=5)
    engine.update("now", version=5, in_flight="keep")
    source = ParamsSource(params(QWEN3, 1), specs, dtype=f32)
    write_payload(source, root / "next", version=6)
    return Serving(engine, root, source, engine.generate(PROMPTS))


def edit(change: Callable[[Manifest], Manifest]) -> Callable[[Path], None]:
    def corrupt(directory: Path) -> None:
        payload.write_manifest(directory, change(manifest.read(directory)))

    return corrupt


def edit_entry(which: str, **changes) -> Callable[[Path], None]:
    return edit(
        lambda m: m._replace(
            entries=tuple(e._replace(**changes) if e.name == which else e for e in m.entries)
        )
    )


def cut_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def link_file(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.rename(directory.parent.parent / "elsewhere")
    file.symlink_to(directory.parent.parent / "elsewhere")


def nest(directory: Path) -> None:
    (directory / manifest.FILE).write_text("[" * 200_000)


def list_dtype(directory: Path) -> None:
    file = directory / manifest.FILE
    file.write_text(file.read_text().replace('"dtype": "float32"', '"dtype": ["float32"]', 1))


def fifo(directory: Path) -> None:
    (directory / manifest.FILE).unlink()
    os.mkfifo(directory / manifest.FILE)


OTHER = LearnerIdentity("another run", "fedcba9876543210")
NORM, LAST = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
CORRUPT = {
    "missing": (edit(lambda m: m._replace(entries=m.entries[1:])), "embed_tokens.weight: missing"),
    "renamed": (edit_entry(NORM, name="model.extra"), f"{NORM}: missing"),
    "surplus": (
        edit(lambda m: m._replace(entries=(*m.entries, m.entries[0]._replace(name="extra")))),
        "extra: unexpected",
    ),
    "twice": (edit(lambda m: m._replace(entries=(*m.entries, m.entries[0]))), "twice"),
    "shape": (edit_entry(NORM, shape=(32,)), f"{NORM}: shape (32,)"),
    "dtype": (edit_entry(NORM, dtype="float16"), f"{NORM}: dtype float16; expected float32"),
    "offset": (edit_entry(NORM, offset=10**9), f"{NORM}: needs 256 bytes"),
    "place": (edit_entry(NORM, file="../../model/model.safetensors"), f"{NORM}: '../../model"),
    "short": (cut_file, "needs"),
    "link": (link_file, "cannot be mapped"),
    "unfinished": (lambda d: (d / manifest.FILE).unlink(), "cannot be read"),
    "foreign": (edit(lambda m: m._replace(learner=OTHER)), "come from learner 'another run'"),
    "nested": (nest, "not JSON"),
    "list": (list_dtype, "dtype ['float32']"),
    "name": (edit_entry(NORM, name="x" * 5000), "has the name 'xxx"),
    "fifo": (fifo, "not a regular file"),
    "older": (edit(lambda m: m._replace(version=4)), "the manifest has version 4"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_payload_is_refused_by_name(serving: Serving, case: str) -> None:
    corrupt, named = CORRUPT[case]
    corrupt(serving.root / "next")
    with pytest.raises(RefusedError) as refusal:
        serving.update()
    assert named in str(refusal.value)
    assert serving.engine.call("version") == "5"
    assert serving.engine.generate(PROMPTS) == serving.outputs


UPDATE = {"payload": "next", "version": 6, "learner": LEARNER._asdict()}


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": 5},
        {"payload": "x" * 5000},
        {"payload": "a\0b"},
        {"payload": ["next"]},
        {"version": "6"},
        {"version": 10**4000},
        {"learner": 5},
        {"learner": {}},
        {"learner": OTHER._asdict()},
        {"surplus": 1},
    ],
    ids=lambda changes: "-".join(f"{key}={value!r:.20}" for key, value in changes.items()),
)
def test_malformed_update_is_refused(serving: Serving, changes: dict) -> None:
    for info in (UPDATE | changes, 5, "next", {}):
        serving.engine.call("start")
        with pytest.raises(RefusedError):
            serving.engine.call("load", info=info)
    assert serving.engine.call("version") == "5"
    assert serving.engine.generate(PROMPTS) == serving.outputs
    serving.update()


def test_refusal_keeps_a_poisoned_server_poisoned(serving: Serving) -> None:
    """The weights are the new ones and the version is the old one, so nothing may be sampled."""
    serving.engine.call("start")
    serving.engine.call("load", info=UPDATE)
    for info in ({}, UPDATE | {"version": 7}):  # the first also ends vLLM's session
        with pytest.raises(PoisonedError, match=r"did not finish.*changed nothing"):
            serving.engine.call("load", info=info)
        serving.engine.call("start")
    serving.engine.call("load", info=UPDATE)
    serving.engine.call("finish", version="6")
    with pytest.raises(RefusedError):
        serving.update(version=7)


def test_a_second_learner_is_refused_by_name(serving: Serving) -> None:
    roots = {"root": str(serving.root), "wire": "float32", "sampler": "float32"}
    with pytest.raises(RefusedError, match=f"{LEARNER.name}.*JAXRL_TAKE_OVER"):
        serving.engine.connect(**roots, learner=OTHER)
    serving.engine.connect(**roots, learner=OTHER._replace(replaces=LEARNER.name))
    serving.engine.learner = LEARNER
    with pytest.raises(RefusedError, match=r"'a run on a host'.*from 'another run'"):
        serving.update()
    with pytest.raises(RefusedError, match="'another run' has taken the server over"):
        serving.engine.connect(**roots)
    assert serving.engine.call("version") == "5"
    serving.engine.call("disconnect")
    with pytest.raises(RefusedError, match="no learner has connected"):
        serving.update()
    serving.engine.connect(**roots, learner=OTHER)
    serving.engine.call("disconnect")


def test_old_version_and_outside_path_are_refused(serving: Serving) -> None:
    edit(lambda m: m._replace(version=4))(serving.root / "next")
    with pytest.raises(RefusedError, match="older than version 5"):
        serving.update(version=4)
    with pytest.raises(RefusedError, match="leads out of the root"):
        serving.engine.update("../model", version=6, in_flight="keep")
    assert serving.engine.generate(PROMPTS) == serving.outputs
    # A learner that reconnects may have resumed from an older checkpoint.
    serving.engine.connect(root=str(serving.root), wire="float32", sampler="float32")
    serving.update(version=4)
    assert serving.engine.generate(PROMPTS) != serving.outputs


def test_failed_load_poisons_until_a_complete_one(serving: Serving) -> None:
    for tensors in (1, 5, 17):
        serving.engine.call("fail_after", tensors=tensors)
        with pytest.raises(PoisonedError, match="the memory went away"):
            serving.update()
        assert serving.engine.call("version") == "5"
        serving.engine.generate(PROMPTS)  # weights are mixed, but every layer is whole
    serving.engine.update("now", version=5, in_flight="keep")
    assert serving.engine.generate(PROMPTS) == serving.outputs


def test_workers_go_on_together_or_not_at_all(serving: Serving) -> None:
    """A worker that goes on alone would mix its half of the weights with the others' old one."""
    serving.engine.call("fails_elsewhere", at=0, text="Too many open files")
    with pytest.raises(RefusedError, match="another worker of the server: Too many open files"):
        serving.update()
    assert serving.engine.generate(PROMPTS) == serving.outputs
    serving.engine.call("fails_elsewhere", at=1, text="the memory went away")
    with pytest.raises(PoisonedError, match="another worker of the server: the memory went away"):
        serving.update()
    assert serving.engine.call("version") == "5"
    serving.update()
    assert serving.engine.call("version") == "6"


@pytest.mark.parametrize("failing", [[1, 1, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]])
def test_all_workers_answers_are_read(engine: ChildEngine, failing: list[int]) -> None:
    """Else they count as answers to the next call."""
    error, left = engine.call("unread_answers", failing=failing)
    assert left == 0
    assert (f"worker {failing.index(1)}" in error) if any(failing) else not error


def test_the_engine_learns_of_a_worker_that_dies_in_a_call(engine: ChildEngine) -> None:
    assert engine.call("woken_by_a_death") == [True, True, True]


@pytest.mark.parametrize("again", [False, True], ids=["being written", "written again"])
def test_payload_changed_during_load_poisons(serving: Serving, again: bool) -> None:
    """The writer removes the manifest first, so what was loaded may be of two versions."""
    file = serving.root / "next" / manifest.FILE
    content = manifest.read(file.parent)
    serving.engine.call("remove_after", tensors=5, file=str(file), again=again)
    with pytest.raises(PoisonedError, match=r"next was written to during the load"):
        serving.update()
    assert serving.engine.call("version") == "5"
    assert file.exists() == again
    payload.write_manifest(file.parent, content)
    serving.update()
    assert serving.engine.call("version") == "6"
    assert serving.engine.generate(PROMPTS) != serving.outputs


def test_connecting_checks_dtype_and_root(serving: Serving) -> None:
    root = str(serving.root)
    with pytest.raises(RefusedError, match="computes in float32 and the learner expects bfloat16"):
        serving.engine.connect(root=root, wire="float32", sampler="bfloat16")
    with pytest.raises(RefusedError, match="no directory"):
        serving.engine.connect(root=root + "-not", wire="float32", sampler="float32")
    serving.update()
    assert serving.engine.call("version") == "6"


def test_wire_dtype_may_be_narrower(serving: Serving) -> None:
    bf16, f32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    source = ParamsSource(params(QWEN3, 1), decoder(QWEN3).specs, dtype=bf16)
    rounded = {name: array.astype(f32) for name, array in source}
    outputs, roles = [], {"sampler": f32, "learner": LEARNER}
    for wire, weights in ((bf16, source), (f32, ListSource(rounded))):
        with SharedMemoryPublisher([serving.engine], wire=wire, **roles) as publisher:
            publisher.publish(weights, version=0)
        outputs.append(serving.engine.generate(PROMPTS))
    assert outputs[0] == outputs[1]


def test_the_head_computes_in_the_dtype_of_the_learners_logits(
    engine: ChildEngine, tmp_path: Path
) -> None:
    """A logit of at least 1/4 is a multiple of 2^-9 in bf16; f32 logits lie between them."""
    bf16 = np.dtype(jnp.bfloat16)
    config = dataclasses.replace(QWEN3, tied=False)
    served = checkpoint(config, 1, tmp_path / "model", bf16)
    source = ParamsSource(params(config, 1), decoder(config).specs, dtype=bf16)
    for head, other, short in (("float32", "bfloat16", "f32"), ("bfloat16", "float32", "bf16")):
        engine.open(served, "bfloat16", head=head)
        for published in range(2):
            steps = 2.0**9 * np.array(engine.call("margins", prompts=PROMPTS))
            off_grid = np.abs(steps - steps.round()) > 0.01
            assert off_grid.mean() > 0.8 if head == "float32" else not off_grid.any()
            if not published:
                roles: Any = {"wire": bf16, "sampler": bf16, "logits": np.dtype(head)}
                with SharedMemoryPublisher([engine], **roles) as publisher:
                    publisher.publish(source, version=0)
        engine.call("disconnect")
        remedies = f"head_dtype.*{other}.*serve has --logits.*train with logits={short} in"
        with pytest.raises(RefusedError, match=f"head computes in {head}.*{remedies}"):
            engine.connect(root=str(tmp_path), wire="bfloat16", sampler="bfloat16", logits=other)


def test_a_server_with_raw_logprobs_is_refused(
    engine: ChildEngine, model: Path, tmp_path: Path
) -> None:
    """vLLM's default is before the temperature; every ratio would be off by the difference."""
    engine.open(model, "float32", logprobs="raw_logprobs")
    engine.model = None  # other tests must open their own
    with pytest.raises(RefusedError, match="start it with --logprobs-mode processed_logprobs"):
        engine.connect(root=str(tmp_path), wire="float32", sampler="float32")
