"""Compilation of the learner's step for TPUs, without a TPU."""

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from jaxrl.models import families
from tests import tiny
from tests.processes import JAXRL

COMPILER = Path(__file__).parents[3] / ".venv-tpu"  # see scripts/test.sh


@pytest.mark.timeout(900)  # processes start slowly on a busy machine
@pytest.mark.skipif(not COMPILER.is_dir(), reason="libtpu is not installed in .venv-tpu")
def test_step_with_splash_attention_compiles_for_v5e(tmp_path):
    sizes = dataclasses.replace(tiny.CONFIG, head_dim=128)
    content = families.to_hf_config(sizes, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(content))
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
    # jax finds the compiler by its import path; with the tests' own flags it would simulate CPUs.
    environment = os.environ | {"PYTHONPATH": str(COMPILER), "XLA_FLAGS": ""}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "v5e:2x2: 4 chips, mesh fsdp 4" in found.stdout
    assert "attention by splash" in found.stdout
    assert "all-gather" in found.stdout
    last = found.stdout.splitlines()[-1]
    assert re.fullmatch(r"peak 0\.\d+ GiB of 15\.8 GiB per chip: fits", last)
