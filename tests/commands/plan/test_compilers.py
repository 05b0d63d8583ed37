"""Compilation of the learner's step for TPUs and GPUs, without either."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.huggingface.config import convert
from tests import tiny
from tests.processes import JAXRL, XLA_FLAGS
from tests.run_config import run_arguments

# See scripts/test.sh.
TPU, GPU = (Path(__file__).parents[3] / name for name in (".venv-tpu", ".venv-gpu"))


def needs(compiler):
    return pytest.mark.skipif(not compiler.is_dir(), reason=f"{compiler.name} is not installed")


def write_model(directory, **sizes):
    content = convert.to_hf_config(dataclasses.replace(tiny.CONFIG, **sizes), dtype="float32")
    (directory / "config.json").write_text(json.dumps(content))


def run_with(compiler, command, *, flags=""):
    # jax finds the compiler by its import path; with the tests' own flags it would simulate CPUs.
    path = f"{compiler}{os.pathsep}{os.getcwd()}"
    environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize(
    ("compiler", "topology"),
    [pytest.param(TPU, "v5e:2x2", marks=needs(TPU)), pytest.param(GPU, "h100:4", marks=needs(GPU))],
)
def test_compiled_products_follow_the_precision(tmp_path, compiler, topology):
    write_model(tmp_path)
    precisions = ("fp32", "fp16_master", "bf16_master")
    command = [sys.executable, "-m", "tests.commands.plan.compiled_products", topology]
    output = run_with(compiler, [*command, str(tmp_path), *precisions])
    found = json.loads(output.splitlines()[-1])
    for precision, operand in zip(precisions, ("f32", "f16", "bf16"), strict=True):
        products = found[precision]
        assert len(products) >= 20
        for x, y, highest in products:
            # Without "highest", a TPU rounds operands of f32 and f16 to bf16, a GPU f32 to tf32.
            assert {x, y} <= {operand, "f32"}, precision
            assert highest, precision


def plan(compiler, model, **keys):
    own = {
        "model.path": model,
        "data.max_prompt_tokens": 128,
        "sampling.max_tokens": 128,
        "train.train_batch": 2,
        "train.microbatch_tokens": 256,
        "mesh.fsdp": 4,
        "probe.every": 10,
    }
    return run_with(compiler, [*JAXRL, "plan", *run_arguments(model, **own | keys)])


@needs(TPU)
def test_step_with_splash_attention_compiles_for_v5e(tmp_path, monkeypatch):
    write_model(tmp_path, head_dim=128)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    output = plan(TPU, tmp_path, topology="v5e:2x2", precision="bf16_master")
    kept = (path.name for path in (tmp_path / "compiled").glob("*"))
    assert not [name for name in kept if "decode_segment" in name]  # could not be read again
    assert "v5e:2x2: 4 chips, mesh fsdp 4" in output
    assert "attention by splash" in output
    assert "all-gather" in output
    assert re.search(r"compiled: reads .* and writes .*, \d\.\d\d times", output)
    last = output.splitlines()[-1]
    assert re.fullmatch(r"peak \d+\.\d MiB of 15\.8 GiB per chip: fits", last)


@pytest.mark.parametrize(
    ("compiler", "step"),
    [
        pytest.param(TPU, "small_v5p", marks=needs(TPU)),
        pytest.param(GPU, "small_h100", marks=needs(GPU)),
    ],
)
def test_compiled_steps_move_and_take_what_is_recorded(compiler, step):
    """Where figures were to change, `scripts/check_chips.py --write` records them."""
    output = run_with(compiler, [sys.executable, "scripts/check_chips.py", step])
    if "recorded none" in output:
        pytest.skip(f"no figures for this compiler: {output.splitlines()[0]}")
    assert len(output.splitlines()) == 4


@pytest.mark.parametrize(
    ("compiler", "topology"),
    [
        pytest.param(TPU, "v5p:1x1x1", marks=needs(TPU)),
        pytest.param(GPU, "h100:1", marks=needs(GPU)),
    ],
)
def test_doctor_takes_costs_from_a_step_compiled_for_a_chip(tmp_path, compiler, topology):
    model = tiny.write_checkpoint(tmp_path / "model")
    keys = ["--precisions=phantom,fp32", "--prompts=2", "--sampling.max_tokens=12"]
    command = [*JAXRL, "doctor", str(model), *keys, f"--out={tmp_path}"]
    # It samples and scores on the CPU, whose programs take longer to optimise than to run.
    command += ["--budget=1e-4", f"--topology={topology}"]
    output = run_with(compiler, command, flags=XLA_FLAGS)
    assert f"a training step on {topology}" in output
    assert "Use precision = 'fp32'" in output
    found = json.loads((tmp_path / "budget.json").read_text())["choices"]
    phantom, fp32 = (one["cost"] for one in found)
    assert 1e-7 < phantom == fp32 < 1e-2  # one learner, one step


@needs(TPU)
def test_single_chip_and_impossible_topology():
    program = """
from jaxrl.commands.plan.topology import open_topology
for name in ("v6e:1x1", "v5p:1x1x1"):
    print(len(open_topology(name).devices))
for name in ("v6e:3x3", "v5p:2x3x1"):
    try:
        open_topology(name)
    except ValueError as error:
        print(error)
"""
    one, other, v6e, v5p = run_with(TPU, [sys.executable, "-c", program]).splitlines()
    assert (one, other) == ("1", "1")
    assert v6e.startswith("topology 'v6e:3x3': libtpu does not support this size (")
    assert v6e.endswith("expected a multiple of a host's v6e:2x2, or a single chip, v6e:1x1")
    assert v5p.endswith("expected a multiple of a host's v5p:2x2x1, or a single chip, v5p:1x1x1")


@needs(GPU)
def test_step_compiles_for_gpus_of_two_hosts(tmp_path):
    write_model(tmp_path)
    output = plan(GPU, tmp_path, topology="h100:2x2", precision="fp32")
    assert "h100:2x2: 4 chips, mesh fsdp 4" in output
    assert "memory and collectives of the step; estimated: memory outside it" in output
    assert "products = exact: f32 operands in one pass, 67 TFLOP/s; bf16 operands: 989" in output
    assert "all-gather" in output
    assert re.search(r"compiled: reads .* and writes .*, \d\.\d\d times", output)
    assert "links at full bandwidth" not in output  # no data sheet has those between hosts
    # jax takes three quarters of a GPU's memory.
    assert re.fullmatch(r"peak .* of 59\.3 GiB per chip: fits", output.splitlines()[-1])
