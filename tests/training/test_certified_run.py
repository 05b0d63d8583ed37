"""A run keeps to the certificate in its directory."""

import json
import shutil

import pytest

from jaxrl.cli import main
from jaxrl.training.certificate import CertificateError
from tests.training.small_runs import run, write_material


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("material"))


def certified(material, out, precision: str, **changes) -> int:
    keys = {"prompts": 4, "completions": 2, "sampling.max_tokens": 8, "out": out} | changes
    given = [f"--{key}={value}" for key, value in keys.items()]
    return main(["doctor", f"{material}/model", "--certify", f"--precisions={precision}", *given])


def test_run_is_held_to_its_certificate(material, tmp_path, capsys):
    directory = tmp_path / "run"
    assert certified(material, directory, "fp32,sums=fixed") == 0
    assert "100.00 %" in capsys.readouterr().out.splitlines()[-2]  # bitwise equal
    path, adapted = directory / "certificate.json", tmp_path / "adapted"
    shutil.copytree(directory, adapted)
    with pytest.raises(CertificateError, match=r"precision.sums was fixed and is any; certify"):
        run(material, directory)
    with pytest.raises(CertificateError, match=r"lora.rank was 0 and is 4; .* delete the file"):
        run(material, adapted, precision="fp32,sums=fixed", lora__rank=4)
    run(material, directory, precision="fp32,sums=fixed", train__steps=1)

    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"facts": whole["facts"] | {"jaxlib": "0.1"}}))
    with pytest.raises(CertificateError, match=r"jaxlib was 0.1 and is .*--certify --out"):
        run(material, directory, precision="fp32,sums=fixed", train__steps=1)
    path.write_text(json.dumps(whole | {"passed": False, "reasons": ["too far"]}))
    with pytest.raises(CertificateError, match=r"was not passed: too far. Change precision"):
        run(material, directory, precision="fp32,sums=fixed", train__steps=1)
    path.write_text("{}")
    with pytest.raises(CertificateError, match="cannot be read"):
        run(material, directory, precision="fp32,sums=fixed", train__steps=1)


def test_mismatch_does_not_pass(material, tmp_path, capsys):
    """A learner in f32, whose sampler has weights of 8 bits, tokens clipped at 1 %."""
    given = {"clip_range": "0.01,0.01"}
    assert certified(material, tmp_path, "phantom,wire=f8_e4m3", **given) == 3
    assert "not passed: " in capsys.readouterr().out
    assert not json.loads((tmp_path / "certificate.json").read_text())["passed"]
    assert certified(material, tmp_path, "fp32,bf16_master") == 1
    assert "--certify takes one" in capsys.readouterr().err
