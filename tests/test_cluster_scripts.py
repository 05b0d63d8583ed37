"""The scripts for clusters: what they start, with stand-ins for srun and gcloud, and their form."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxrl.commands import options, train
from jaxrl.config.fleet import FleetConfig
from jaxrl.config.training import Config
from jaxrl.fleet.request import lacking, requests
from tests.locks import pins

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "scripts" / "cluster"
SHELL = [CLUSTER / name for name in ("slurm.sbatch", "slurm_ray.sbatch", "tpu_vm.sh")]
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
def test_shell_scripts_can_be_parsed(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("linter", ["shellcheck", "hadolint"])
def test_scripts_and_image_have_no_findings(linter):
    if not shutil.which(linter):
        pytest.skip(f"{linter} is not installed")
    files = SHELL if linter == "shellcheck" else [CLUSTER / "Dockerfile"]
    subprocess.run([linter, *files], check=True)


def test_image_copies_existing_files():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    assert copies
    assert all((ROOT / name).exists() for names in copies for name in names)


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


def fleet_of(command: str) -> FleetConfig:
    """The [fleet] of a `jaxrl train` command, as its own parser reads it."""
    argv = shlex.split(command.replace("\\\n", " "))
    argv = argv[argv.index("train") + 2 :]
    given = ["--model.path=m", "--data.path=d.jsonl", "--reward.path=exact_match"]
    given += ["--sampler.name=vllm"] * ("--fleet.servers" in argv)
    return options.parse_arguments(train.parser(), Config, [*given, *argv]).config.fleet


@pytest.mark.parametrize("name", ["rayjob.yaml", "rayjob_tpu.yaml"])
def test_ray_job_has_what_the_fleet_asks_for(name):
    spec = yaml.safe_load((CLUSTER / name).read_text())["spec"]
    fleet, cluster = fleet_of(spec["entrypoint"]), spec["rayClusterSpec"]
    assert fleet.engine == "ray"
    assert cluster["rayVersion"] == pins("requirements-dev.txt", "3.12.0")["ray"]
    nodes = []
    head = cluster["headGroupSpec"]
    for group in (head, *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        cpus = group["rayStartParams"].get("num-cpus", limits.get("cpu", 0))
        node = {"CPU": float(cpus), "GPU": float(limits.get("nvidia.com/gpu", 0))}
        count = group.get("replicas", 1) * group.get("numOfHosts", 1)
        nodes += [node] * count
        if "google.com/tpu" in limits:
            topology = group["template"]["spec"]["nodeSelector"][
                "cloud.google.com/gke-tpu-topology"
            ]
            assert fleet.learner_slice == f"v6e:{topology}"
            chips = eval(topology.replace("x", "*"))
            assert count == chips // int(limits["google.com/tpu"])
    assert lacking(requests(fleet), nodes) == []


def test_sky_task_asks_for_its_own_nodes():
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    line = next(
        part for part in task["run"].replace("\\\n", " ").splitlines() if "jaxrl train" in part
    )
    fleet = fleet_of(line)
    assert fleet.learners == task["num_nodes"]
    assert f"GPU={task['resources']['accelerators'].partition(':')[2]}" in fleet.learner_resources


def test_slurm_ray_starts_a_node_each_and_one_command(run, tmp_path, monkeypatch):
    """With stand-ins: a Ray that blocks, and is healthy once it has been started."""
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    stays = STAND_IN + "import time\ntime.sleep(600)\n"
    healthy = STAND_IN + 'sys.exit("start --head" not in open(os.environ["CALLS"]).read())\n'
    stand_ins = {tmp_path / "srun": stays, venv / "ray": healthy, venv / "jaxrl": STAND_IN}
    for path, text in stand_ins.items():
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("VENV", str(venv.parent))
    calls = run(CLUSTER / "slurm_ray.sbatch", "my config.toml", "--fleet.workers", "32")
    (started,) = [call for call in calls if call[0] == "--ntasks-per-node=1"]
    assert "start --head" in started[-1]
    (command,) = [call for call in calls if call[0] == "train"]
    assert command[1:4] == ["my config.toml", "--fleet.workers", "32"]
    assert command[4:6] == ["--fleet.engine", "ray"]
