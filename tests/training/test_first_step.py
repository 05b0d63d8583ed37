"""What a run says before its first step, and of the model that it wrote."""

import json
import logging
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl import huggingface
from jaxrl.cli import main
from jaxrl.config.tables import EvalConfig
from jaxrl.huggingface import Checkpoint
from jaxrl.models.model import decoder
from jaxrl.training.first_lines import first_lines
from jaxrl.training.first_step import first_step
from tests import tiny
from tests.run_config import run_config
from tests.training.small_runs import write_material


class Lines:
    """A tracker that keeps its notes."""

    def __init__(self) -> None:
        self.said = []

    def note(self, text):
        self.said.append(text)

    detail = note


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "first_steps.json"
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_run_tells_how_many_tokens_truncation_keeps():
    """Where no key does: records name 42 tokens, and the model has 64."""
    model = decoder(tiny.CONFIG)

    def said(**keys) -> str:
        config = run_config("nothing", **{f"sampling.{key}": value for key, value in keys.items()})
        given = {"devices": "one", "lengths": [], "held_out": 0}
        return "\n".join(first_lines(config, model, specs=model.specs, **given))

    for keys in ({"top_p": 0.9}, {"min_p": 0.1}):
        assert "sampling: keeps the 42 most probable of 64 tokens" in said(**keys)
    for keys in ({}, {"top_k": 5}, {"top_p": 0.9, "top_k": 5}):
        assert "sampling:" not in said(**keys)


def test_the_last_first_step_is_told(cache):
    def start(shapes, *, done=False):
        with first_step(shapes, tracker=(lines := Lines()), done=done) as after:
            jax.jit(lambda x: x * jnp.float32(len(lines.said)))(1.5)
            after()
            after()
        return lines.said

    said = start((jnp.ones(3), "row"))
    assert said[0].endswith("the next start takes them from a cache")
    (kept,) = json.loads(cache.read_text()).values()
    assert kept["programs"] >= 1
    assert f"{kept['programs']} programs (" in said[1]
    assert len(said) == 2

    again = start((jnp.zeros(3), "row"))  # values do not change the programs
    assert f"the last time {kept['programs']}, in {kept['seconds']:.0f} s" in again[0]
    assert "the next start" in start((jnp.ones(4), "row"))[0]
    assert start((jnp.ones(3), "row"), done=True) == []
    others = {key: {"programs": "many"} for key in json.loads(cache.read_text())}
    for damaged in ("[", json.dumps(others)):
        cache.write_text(damaged)
        assert "the next start" in start((jnp.ones(3), "row"))[0]
    jax.config.update("jax_compilation_cache_dir", None)  # which the fixture puts back
    assert "the next start" not in start((jnp.ones(5), "row"))[0]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    directory = write_material(tmp_path_factory.mktemp("material"))
    config, params = huggingface.load(directory / "model", dtype=None)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    huggingface.save(
        directory / "half",
        half,
        config,
        dtype=jnp.dtype(jnp.bfloat16),
        source=Checkpoint(directory / "model"),
    )
    return directory


def test_sft_writes_the_dtype_it_started_from(material, tmp_path, capsys):
    run = [
        "sft",
        f"--data.path={material}/texts.jsonl",
        f"--run_dir={tmp_path}/run",
        "--train.steps=1",
        "--train.batch_size=3",
        "--train.row_length=48",
        "--train.microbatch_tokens=96",
    ]
    assert main([*run, f"--model.path={material}/half"]) == 0
    shown = capsys.readouterr()
    again = f"jaxrl export {tmp_path}/run OUT --dtype f32"
    assert f"model (bf16, as the model it started from; as trained: {again})\n" in shown.out
    assert Checkpoint(tmp_path / "run" / "model").dtype == jnp.bfloat16
    first = [line.partition(":")[0] for line in shown.err.splitlines()[:5]]
    assert first == ["model", "parameters", "devices", "data", "precision"]
    assert re.search(r"^parameters: [\d,]+, all trained$", shown.err, re.MULTILINE)
    assert "data: " in shown.err
    assert "rows: 10; tokens: median" in shown.err
    assert "the first, trained in" not in shown.err

    exported = ["export", f"{tmp_path}/run"]
    assert main([*exported, f"{tmp_path}/whole", "--dtype", "f32"]) == 0
    _, whole = huggingface.load(tmp_path / "whole", dtype=None)
    _, written = huggingface.load(tmp_path / "run" / "model", dtype=None)
    for exact, short in zip(jax.tree.leaves(whole), jax.tree.leaves(written), strict=True):
        assert exact.dtype == jnp.float32
        assert (exact.astype(jnp.bfloat16) == short).all()
    assert any(
        (x != x.astype(jnp.bfloat16).astype(jnp.float32)).any() for x in jax.tree.leaves(whole)
    )
    capsys.readouterr()
    assert main([*exported, f"{tmp_path}/whole"]) == 1
    assert "whole holds a model; add --overwrite" in capsys.readouterr().err
    assert main([*exported, f"{tmp_path}/short", "--dtype", "fp16"]) == 1
    assert "--dtype 'fp16': expected f32, bf16 or f16" in capsys.readouterr().err
    assert main([*exported, f"{tmp_path}/whole", "--overwrite"]) == 0
    assert Checkpoint(tmp_path / "whole").dtype == jnp.bfloat16

    run = [*run[:2], f"--run_dir={tmp_path}/other", *run[3:]]
    assert main([*run, f"--model.path={material}/model", "--verbose"]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("model (f32)\n")
    assert "the first, trained in ⟦ ⟧: " in shown.err
    assert re.search(r"the first step was done after \d+ s; \d+ programs", shown.err)
    assert main(["losses", "rloo"]) == 0  # the next command is quiet again
    assert not logging.getLogger("jaxrl").isEnabledFor(logging.INFO)


def test_held_out_data_are_measured_ten_times_by_default():
    assert EvalConfig().interval(200) == 20
    assert EvalConfig().interval(20) == 2
    assert EvalConfig().interval(19) == 0
    assert EvalConfig(every=0).interval(200) == 0
    assert EvalConfig(every=3).interval(200) == 3


def test_a_small_model_knows_its_dtype(tmp_path):
    tiny.write_checkpoint(tmp_path)
    assert Checkpoint(tmp_path).dtype is None
