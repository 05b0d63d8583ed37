"""Commands that sample from a running vLLM server."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl.cli import main
from tests.sampling.serving import Material, started, write_material

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build is for Linux")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    directory = tmp_path_factory.mktemp("vllm")
    write_material(directory)
    with started(directory) as server:
        yield Material(server.url, directory)


def test_eval_by_a_server_equals_eval_here(material, tmp_path, capsys):
    """Greedy, in completions of one turn and in episodes with an environment."""
    data, model = str(material.directory / "prompts.jsonl"), str(material.directory / "model")
    common = ["--precision", "fp32", "--model.path", model, "--data.path", data, "--data", data]
    common += ["--data.max_prompt_tokens", "16", "--sampling.max_tokens", "24"]
    for kind in (
        ["--reward.path", f"{material.directory}/reward.py:short"],
        ["--environment.name", f"{Path(__file__).with_name('twice.py')}:Twice"],
    ):
        found = []
        for where in ([], ["--sampler", "vllm", "--sampler.url", material.url]):
            file = tmp_path / "completions.jsonl"
            assert main(["eval", *common, *kind, *where, "--completions", str(file)]) == 0
            found.append((file.read_text(), capsys.readouterr().out))
        assert found[0] == found[1]


def test_the_doctor_uses_a_running_server(material, tmp_path, capsys):
    keys = {"prompts": "4", "sampling.max_tokens": "12", "timed_steps": "0", "precisions": "fp32"}
    keys |= {"server": material.url, "out": str(tmp_path)}
    given = [f"--{key}={value}" for key, value in keys.items()]
    assert main(["doctor", str(material.directory / "model"), *given]) == 0
    assert "Use precision = 'fp32'" in capsys.readouterr().out
    (only,) = json.loads((tmp_path / "doctor.json").read_text())["precisions"]
    assert only["sampler"] == "vLLM f32"
    assert only["dtype_std"] == 0  # learner and shadow compute the same
    assert only["beta_p99"] < 1e-4
    whole = only["dtype"] + only["engine"] + only["decoding"]
    assert whole == pytest.approx(only["beta"], abs=1e-7)
