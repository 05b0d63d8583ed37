"""The scripts for clusters: what they start, with stand-ins for srun and gcloud, and their form."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "scripts" / "cluster"
SHELL = [CLUSTER / "slurm.sbatch", CLUSTER / "tpu_vm.sh"]
# Writes its arguments, one JSON list a line.
STAND_IN = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs a script and returns the calls of srun and gcloud."""
    for name in ("srun", "gcloud"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("VENV", raising=False)

    def call(*command):
        (tmp_path / "calls").write_text("")
        subprocess.run(command, check=True, cwd=ROOT)
        return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return call


def test_slurm_starts_one_process_a_node(run):
    ((*options, jaxrl, command, config, key, value, hosts, auto),) = run(
        CLUSTER / "slurm.sbatch", "my config.toml", "--mesh.fsdp", "16"
    )
    assert options == ["--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert [jaxrl, command, config] == [".venv/bin/jaxrl", "train", "my config.toml"]
    assert [key, value, hosts, auto] == ["--mesh.fsdp", "16", "--hosts.coordinator", "auto"]


def test_every_host_gets_config_and_command(run, tmp_path):
    (tmp_path / "my.toml").write_text("")
    script, text = CLUSTER / "tpu_vm.sh", "a 'quoted' text"
    copied, started = run(
        script, "slice", "us-east1-d", "train", tmp_path / "my.toml", "--data.system_prompt", text
    )
    assert copied[3:] == ["scp", str(tmp_path / "my.toml"), "slice:my.toml", *copied[6:]]
    assert "--worker=all" in copied
    assert "--worker=all" in started
    remote = started[-1].removeprefix("--command=").replace("venv/bin/jaxrl", "printf '%s\\n'")
    said = subprocess.run(["bash", "-c", remote], check=True, capture_output=True, text=True)
    assert said.stdout.splitlines() == [
        "train",
        "my.toml",
        "--data.system_prompt",
        text,
        "--hosts.coordinator",
        "auto",
    ]
    bundle, installed = run(script, "slice", "us-east1-d", "install")
    assert bundle[5] == "slice:jaxrl.tar.gz"
    assert "pip install" in installed[-1]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_scripts_have_no_findings(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def test_image_copies_existing_files():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    assert copies
    assert all((ROOT / name).exists() for names in copies for name in names)
    if shutil.which("hadolint"):
        subprocess.run(["hadolint", CLUSTER / "Dockerfile"], check=True)


def test_job_set_has_one_pod_per_host():
    job = yaml.safe_load((CLUSTER / "gke.yaml").read_text())
    (replicated,) = job["spec"]["replicatedJobs"]
    inner = replicated["template"]["spec"]
    pod = inner["template"]["spec"]
    (container,) = pod["containers"]
    chips = eval(pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].replace("x", "*"))
    each = container["resources"]["limits"]["google.com/tpu"]
    assert inner["parallelism"] == inner["completions"] == chips // each
    assert container["args"][-2:] == ["--hosts.coordinator", "auto"]
