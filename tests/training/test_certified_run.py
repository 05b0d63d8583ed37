"""A run keeps to the certificate in its directory."""

import json
import shlex
import shutil

import pytest

from jaxrl.bridge import VllmServer
from jaxrl.builders.certificate import NAME
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import find_models
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.sampler import Serving, facts_of_servers
from jaxrl.cli import main
from jaxrl.commands.doctor.command import parser
from jaxrl.commands.options import parse_arguments
from jaxrl.config.doctor import DoctorConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.sampling import NullSampler
from jaxrl.training import certificate
from jaxrl.training.certificate import CertificateError, check_certificate
from tests.run_config import run_config
from tests.training.json_server import JsonHandler, serving
from tests.training.small_runs import run, write_material


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("material"))


def certified(material, out, precision: str, **changes) -> int:
    keys = {"prompts": 16, "completions": 8, "sampling.max_tokens": 16, "out": out} | changes
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
    older = {"jaxlib": "0.1", "device": "cpu avx"}
    path.write_text(json.dumps(whole | {"facts": whole["facts"] | older}))
    changes = r"device was cpu avx and is cpu.* jaxlib was 0.1 and is .*--certify --precisions"
    with pytest.raises(CertificateError, match=changes):
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


EMBEDDED = {"sampler": "embedded", "sampler.mesh": "whole"}


@pytest.fixture(scope="module")
def held(material, tmp_path_factory):
    """Holds a run with other keys to a certificate of clip_range .2,.28."""
    directory = tmp_path_factory.mktemp("held")
    assert certified(material, directory, "fp32", clip_range="0.2,0.28") == 0

    def check(run_dir=directory, facts=EMBEDDED, **changes) -> str | None:
        config = run_config(material, run_dir=run_dir, **changes)
        serving = Serving(NullSampler(), lambda *_, **__: {}, facts=lambda: facts)
        layout, clips = make_layout(MeshConfig()), make_recipe(config).objective.clips
        models = find_models(config)
        return check_certificate(config, serving, models=models, layout=layout, clips=clips)

    check.certificate = directory / NAME
    return check


def test_certificate_is_for_the_clip_of_the_loss(held):
    for name in ("dapo", "cispo", "gpg"):  # the others have no clip
        assert "as certified" in held(loss__name=name)
    # With the anchor below it, the ratio does not contain the mismatch.
    assert "as certified" in held(loss__name="grpo", loss__ratio="over_anchor")
    with pytest.raises(CertificateError, match=r"clip was 0.8 to 1.28 and is 0.8 to 1.2; .*"):
        held(loss__name="grpo")
    with pytest.raises(CertificateError, match=r"is 0.9997 to 1.0004, mean of a sequence; .* mean"):
        held(loss__name="gspo")
    with pytest.raises(CertificateError, match=r"is 0.67032 to 1.49182; "):
        held(loss__name="gmpo")


SEVERAL = """
from jaxrl.losses import clipped, dapo, over_sampler, prefix

def several():
    return dapo() + prefix(clipped(over_sampler, low=0.3, high=0.3), "wider/")
"""


def test_certificate_of_one_clip_does_not_hold_for_a_loss_with_several(held, tmp_path):
    path = tmp_path / "loss.py"
    path.write_text(SEVERAL)
    several = r"was 0.8 to 1.28 and is 0.7 to 1.3 and 0.8 to 1.28; .* cannot be certified"
    with pytest.raises(CertificateError, match=several):
        held(loss__name=f"{path}:several")


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("sampling.top_p", 0.9, "sampling.top_p was 1.0 and is 0.9; .* cannot be certified"),
        ("train.replay_routing", True, "train.replay_routing was false and is true; .* cannot be"),
        ("sampling.temperature", 0.5, "sampling.temperature was 1.0 and is 0.5; .* cannot be"),
        ("mesh.tensor", 2, r"mesh.tensor was 1 and is 2; certify again .* --mesh.tensor 2"),
        ("mesh.parameters", "vocab=", r"mesh.parameters was .* --mesh.parameters vocab="),
    ],
)
def test_certificate_is_for_what_the_doctor_measured(held, key, given, expected):
    with pytest.raises(CertificateError, match=expected):
        held(loss__name="dapo", **{key: given})


def test_kernel_of_attention_is_a_fact(held, monkeypatch):
    monkeypatch.setattr(certificate, "choose_kernel", lambda *_, **__: "splash")
    with pytest.raises(CertificateError, match=r"attention was xla and is splash; .* splash"):
        held(loss__name="dapo")


def test_the_advised_command_certifies_the_run(material, tmp_path):
    """Whatever of the run's keys its arithmetic depends on, the command names it."""
    servers = {
        "sampler.name": "vllm",
        "sampler.device": "cuda",
        "sampler.vllm_args": '["--block-size=32", "--hf-overrides={\\"a\\": 1, \\"b\\": 2}"]',
        "data.template_kwargs.enable_thinking": "false",
        "data.prompt_format": "two words: {prompt}",
        "mesh.fsdp": 2,
        "loss.name": "gspo",
        "precision": "bf16_master,logits=f32",
    }
    urls = {"sampler.name": "vllm", "sampler.url": "http://a:1,http://b:2", "loss.clip_low": 0.1}
    for changes in (servers, urls, {"sampler.devices": 2, "loss.name": "gmpo"}):
        config = run_config(material, run_dir=tmp_path, **changes)
        clips = make_recipe(config).objective.clips
        command = shlex.split(certificate.certifying_command(config, clips, attention="xla"))
        assert command[:2] == ["jaxrl", "doctor"]
        found, given = parse_arguments(parser(), DoctorConfig, command[2:])
        assert given.certify
        assert found.sampler == config.sampler
        assert found.mesh == config.mesh
        assert found.precisions == (config.precision.text,)
        assert found.data.model_dump().items() <= config.data.model_dump().items()
        assert {found.clip} == clips
        assert found.out == str(tmp_path)


class Stated(JsonHandler):
    """A server that lists its settings."""

    cache = "auto"

    def get(self) -> None:
        cache = {"cache_dtype": self.cache}
        tables = {"model_config": {"dtype": "torch.bfloat16"}, "cache_config": cache}
        version = {"version": "0.32.0"}
        self.answer(version if self.path == "/version" else {"vllm_config": tables})


class Narrow(Stated):
    cache = "fp8"


def test_run_is_held_to_all_of_its_servers(held, tmp_path):
    path = tmp_path / NAME
    with serving(Stated) as one, serving(Stated) as other, serving(Narrow) as narrow:
        servers = {url: VllmServer(url) for url in (one, other, narrow)}
        alike = facts_of_servers([servers[one], servers[other]])
        whole = json.loads(held.certificate.read_text())
        whole["facts"] = {k: v for k, v in whole["facts"].items() if k not in EMBEDDED} | alike
        path.write_text(json.dumps(whole))
        assert "as certified" in held(tmp_path, alike, loss__name="dapo")
        mixed = facts_of_servers([servers[one], servers[narrow]])
    with pytest.raises(CertificateError, match="cache_dtype was auto and is auto and fp8; certify"):
        held(tmp_path, mixed, loss__name="dapo")
