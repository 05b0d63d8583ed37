"""`jaxrl bench` on a tiny model: what the numbers must satisfy, not how large they are."""

import json
from types import SimpleNamespace

import pytest

from jaxrl.cli import main
from jaxrl.commands.bench import work
from jaxrl.core.precision import Precision
from tests import tiny

SIZES = ["--row=32", "--sequence=16", "--prompt=8", "--microbatches=2", "--sequences=8"]
SIZES += ["--completion=8", "--repetitions=1"]
# Of tests.tiny: two layers of four heads of 8, with two for keys; the embedding is the head.
WEIGHTS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
EMBEDDING, NORMS = 64 * 32, 2 * (2 * 32 + 2 * 8) + 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny.write_checkpoint(directory)
    return str(directory)


def test_measures_every_part(model, tmp_path, capsys):
    out = tmp_path / "bench.json"
    asked = ["bench", model, "--precisions", "fp32", "--out", str(out)]
    assert main([*asked, *SIZES]) == 0
    found = json.loads(out.read_text())
    assert found["versions"].keys() >= {"jaxrl", "jax", "flax"}
    assert found["parameters"] == WEIGHTS + EMBEDDING + NORMS
    (parts,) = found["precisions"].values()
    learner = parts["learner"]
    assert learner["MFU"] == pytest.approx(learner["model TFLOP/s"] / learner["peak TFLOP/s"])
    # Of a token: 6 a weight, the head for half of them, and 3 times the causal half of attention.
    flops = 6 * WEIGHTS + 6 * EMBEDDING / 2 + 3 * 2 * 4 * (8 + 8) * 16
    assert learner["model TFLOP/s"] * 1e12 / learner["tokens/s"] == pytest.approx(flops)
    assert parts["decode"]["tokens/s"] > 0
    publish = parts["publish"]
    assert publish["GB"] == pytest.approx(4 * found["parameters"] / 1e9)
    assert publish["GB/s"] == pytest.approx(publish["GB"] / publish["seconds"])
    assert parts["beta"]["std"] < 1e-4  # the same arithmetic on both sides
    assert f"{found['device']}, {model}" in capsys.readouterr().out


def test_peaks_are_of_data_sheets(monkeypatch):
    def peak(kind, text):
        monkeypatch.setattr(work.jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
        return work._peak(Precision.parse(text))

    assert peak("NVIDIA A100-SXM4-80GB", "bf16_master") == (312e12, "data sheet of a100")
    assert peak("NVIDIA H100 80GB HBM3", "fp16_master") == (989.4e12, "data sheet of h100")
    assert peak("TPU v6 lite", "bf16_master") == (918e12, "data sheet of v6e")
    assert peak("TPU7x", "bf16_master") == (2307e12 / 2, "data sheet of tpu7x")  # half a chip


def test_beta_is_of_the_dtype_policy(model, tmp_path, capsys, monkeypatch):
    def fails(bench, precision):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(work, "publish", fails)
    out = tmp_path / "bench.json"
    texts = "phantom,wire=f32,fp32,sums=fixed"
    asked = ["bench", model, "--precisions", texts, "--only", "publish,beta"]
    assert main([*asked, "--out", str(out), *SIZES]) == 0
    parts, fixed = json.loads(out.read_text())["precisions"].values()
    assert fixed["beta"]["std"] == 0
    assert parts["beta"]["std"] > 1e-3  # bf16 has 8 bits
    assert parts["publish"] == {"error": "RESOURCE_EXHAUSTED: out of memory"}
    shown = capsys.readouterr().out
    assert "phantom,wire=f32: publish failed; beta std " in shown
    assert main(["bench", "--prompt=600", "--only=beta"]) == 1
    assert "a prompt must be shorter than its sequence" in capsys.readouterr().err
