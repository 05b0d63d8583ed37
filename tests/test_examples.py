"""The examples run as they stand, on the quickstart's material made small."""

import functools
import json
import re
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

import jaxrl
from jaxrl.bridge import SharedMemoryPublisher
from jaxrl.core.processor import may_multiply_bf16
from jaxrl.sampling import VllmSampler
from tests import arithmetic, published
from tests.bridge.engines import VLLM_PYTHON
from tests.documented import snippets
from tests.huggingface import stand_in

pytestmark = pytest.mark.usefixtures("optimized")
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("quickstart")
    arithmetic.write(directory)
    (directory / "sft").mkdir()
    sizes = arithmetic.TINY | {"head_dim": 32}  # vLLM has no attention on CPUs for smaller heads
    arithmetic.script.write_model(directory / "sft/model", sizes, seed=0)
    rows = (directory / "train.jsonl").read_text()
    (directory / "train.jsonl").write_text(rows * (256 // len(rows.splitlines())))
    return directory


def run(name: str, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def executed(notebook: str) -> dict[str, Any]:
    """Runs the cells of a notebook in order; returns their names."""
    cells = json.loads((EXAMPLES / notebook).read_text())["cells"]
    namespace: dict[str, Any] = {"__name__": notebook}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    return namespace


def test_grpo_example_is_short(material, monkeypatch, capsys):
    run("grpo.py", material, monkeypatch=monkeypatch)
    assert capsys.readouterr().out.count("reward 0.0") == 3
    lines = (EXAMPLES / "grpo.py").read_text().splitlines()
    ours = [line for line in lines if line.startswith(("import jaxrl", "from jaxrl"))]
    assert ours == ["import jaxrl"]
    assert len(lines) <= 40


def test_own_loss_prints_its_formula(material, monkeypatch, capsys):
    run("own_loss.py", material, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "0.001 * kl_penalty(k3)" in out
    assert out.count("KL from the reference") == 5


def test_plain_nnx_module_learns(material, monkeypatch, capsys):
    run("nnx_module.py", material, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    rewards = [float(line.split("reward ")[1].split(",")[0]) for line in lines]
    assert rewards[-1] > rewards[0] + 0.1
    # The sampler decodes without a cache what the learner scores.
    assert all(abs(float(line.split("KL ")[1])) < 1e-4 for line in lines)


def test_sweep_trains_every_seed(material, monkeypatch, capsys):
    run("sweep.py", material, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split("seed ")[1].split()) for line in lines] == [3] * 4
    assert len((EXAMPLES / "sweep.py").read_text().splitlines()) < 60


def test_precision_sweep_locates_the_mismatch(material, monkeypatch, capsys, tmp_path):
    run("precision_sweep.py", material, tmp_path / "sweep.png", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    found = {line.split(":")[0]: float(line.split()[-1]) for line in lines[:4]}
    assert all(10 * found[name] < found["phantom"] for name in found.keys() - {"phantom"})
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="needs scripts/install_vllm.sh")
def test_async_sampling_is_one_version_old(material, monkeypatch, capsys):
    """A publish waits here for the first completion of the samples that it overlaps: requests that
    start after it have the new version already."""
    begun = [threading.Event() for _ in range(8)]  # by the seed of the samples
    sample, publish = VllmSampler.sample_turns, SharedMemoryPublisher.publish

    def noting(sampler, turns, params):
        for completion in sample(sampler, turns, params):
            begun[params.seed].set()
            yield completion

    def waiting(publisher, source, *, version):
        assert version not in range(1, 8) or begun[version].wait(250)
        return publish(publisher, source, version=version)

    monkeypatch.setattr(VllmSampler, "sample_turns", noting)
    monkeypatch.setattr(SharedMemoryPublisher, "publish", waiting)
    monkeypatch.chdir(EXAMPLES.parent)
    run("async_vllm.py", material, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[-2]) for line in lines] == [0, *range(7)]


def test_the_tour_runs_from_top_to_bottom(material, monkeypatch):
    monkeypatch.chdir(material.parent)
    monkeypatch.setenv("JAXRL_TOUR", str(material))
    executed("tour.ipynb")


def test_the_notebook_for_one_gpu_trains_a_model_of_the_hub(
    material, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{a}+{a}=?", "answer": f"#### {2 * a}"} for a in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["--model.path=lab/tiny", "--data.path=sums.jsonl", "--data.eval_path=sums.jsonl"]
    small += ["--data.template=text", "--data.system_prompt=none", "--data.max_prompt_tokens=16"]
    small += ["--sampling.max_tokens=8", "--train.steps=1", "--train.train_batch=2"]
    small += ["--train.group_size=2", "--train.microbatch_tokens=128", "--precision=fp32"]
    monkeypatch.setenv("JAXRL_COLAB", " ".join(small))
    monkeypatch.setattr(sys, "argv", sys.argv)  # the notebook sets it
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with stand_in.serving(material / "sft/model") as url:
        own = {"endpoint": url, "cache_dir": tmp_path / "hub"}
        download = functools.partial(huggingface_hub.snapshot_download, **own)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        executed("colab.ipynb")
    shown = capsys.readouterr()
    assert re.search(rf"^model: \S+/snapshots/{'1' * 40} ", shown.err, re.MULTILINE)
    assert re.search(r"parameters: [\d,]+, and [\d,]+ of adapters are trained", shown.err)
    assert "GiB" in shown.out  # of the plan
    assert "held-out accuracy: " in shown.out
    assert "step 1: held-out accuracy " in shown.out
    assert "How many eggs are in 6 boxes?\n" in shown.out
    for name in ("report.html", "runs/colab/model/config.json", "runs/colab/adapter"):
        assert (tmp_path / name).exists()


def test_diagnosis_separates_policy_from_rounding(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    found = executed("diagnose.ipynb")
    fresh, moved = found["fresh"], found["moved"]
    assert 100 * fresh["alpha_std"] < fresh["beta_std"]
    assert fresh["phantom"] == fresh["clipped"] > 0
    # Units for bf16 add in an order of their own in each shape, and roundings differ between them.
    assert moved["alpha_std"] > (100 if may_multiply_bf16() else 1000) * fresh["alpha_std"]
    assert moved["alpha_std"] > moved["beta_std"]
    assert moved["phantom"] < moved["clipped"]
    assert (tmp_path / "diagnose.png").read_bytes().startswith(b"\x89PNG")
    raised = [(alarm.name, alarm.step) for alarm in found["alarms"]]
    assert raised == [("kl_spike", 30), ("kl_with_reward", 30), ("length_zero", 39)]
    assert found["same"]
    assert "host/metadata is not what was saved" in found["damage"]


def test_the_readmes_program_reads_as_a_published_model_does(tmp_path, monkeypatch):
    """Prompts and ends as Qwen3's own template has them."""
    monkeypatch.chdir(tmp_path)
    (program,) = (
        s.text
        for s in snippets("python")
        if "jaxrl.make_learner(" in s.text and "README" in s.where
    )
    published.checkpoint("qwen3", tmp_path / "model")
    # A step on two short answers to each prompt: each token has 151,669 logits.
    small = {
        "runs/quickstart/sft/model": str(tmp_path / "model"),
        "range(3)": "range(1)",
        "max_tokens=36": "max_tokens=4",
        "group_size=8": "group_size=2",
    }
    for own, changed in small.items():
        assert own in program
        program = program.replace(own, changed)
    found: dict[str, Any] = {}
    exec(program, found)
    tokenizer = published.tokenizer("qwen3")
    asked = [{"role": "user", "content": example["prompt"]} for example in found["examples"]]
    prompts = [
        tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        for message in asked
    ]
    assert [r.prompt.tolist() for r in found["rollouts"]] == [p for p in prompts for _ in range(2)]
    assert {(tokenizer.convert_tokens_to_ids("<|im_end|>"),)} <= {*found["base"].stop}
    assert np.isfinite(jaxrl.to_floats(found["metrics"])["loss"])
