"""Compilation of the learner's step for TPUs, without a TPU."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.models import families
from tests import tiny
from tests.processes import JAXRL

COMPILER = Path(__file__).parents[3] / ".venv-tpu"  # see scripts/test.sh


pytestmark = [
    pytest.mark.timeout(900),  # processes start slowly on a busy machine
    pytest.mark.skipif(not COMPILER.is_dir(), reason="libtpu is not installed in .venv-tpu"),
]


def write_model(directory, **sizes):
    content = families.to_hf_config(dataclasses.replace(tiny.CONFIG, **sizes), dtype="float32")
    (directory / "config.json").write_text(json.dumps(content))


def run_with_compiler(command):
    # jax finds the compiler by its import path; with the tests' own flags it would simulate CPUs.
    path = f"{COMPILER}{os.pathsep}{os.getcwd()}"
    environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_compiled_products_have_the_operands_that_the_policy_names(tmp_path):
    write_model(tmp_path)
    policies = ("fp32", "fp16_master", "bf16_master")
    command = [sys.executable, "-m", "tests.commands.plan.tpu_child", str(tmp_path), *policies]
    found = json.loads(run_with_compiler(command).splitlines()[-1])
    for policy, operand in zip(policies, ("f32", "f16", "bf16"), strict=True):
        products = found[policy]
        assert len(products) >= 20
        for x, y, highest in products:
            # Without "highest", a TPU rounds operands of f32 and f16 to bf16.
            assert {x, y} <= {operand, "f32"}, policy
            assert highest, policy


def test_step_with_splash_attention_compiles_for_v5e(tmp_path):
    write_model(tmp_path, head_dim=128)
    keys = {
        "topology": "v5e:2x2",
        "model.path": tmp_path,
        "data.path": "d",
        "data.max_prompt_tokens": 128,
        "reward.path": "exact_match",
        "sampling.max_tokens": 128,
        "train.train_batch": 2,
        "train.group_size": 4,
        "train.microbatch_tokens": 256,
        "mesh.fsdp": 4,
        "precision": "bf16_master",
    }
    command = [*JAXRL, "plan"]
    for key, value in keys.items():
        command += [f"--{key}", str(value)]
    output = run_with_compiler(command)
    assert "v5e:2x2: 4 chips, mesh fsdp 4" in output
    assert "attention by splash" in output
    assert "all-gather" in output
    last = output.splitlines()[-1]
    assert re.fullmatch(r"peak 0\.\d+ GiB of 15\.8 GiB per chip: fits", last)
