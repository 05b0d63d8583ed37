"""The doctor's measurements and advice; fp32 agrees with itself."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.cli import main
from jaxrl.commands.doctor.attribute import server_settings
from jaxrl.commands.doctor.compiled import learner_policy, planned
from jaxrl.commands.doctor.text import Measurement, recommend, table
from jaxrl.config import toml_file
from jaxrl.config.doctor import DoctorConfig
from jaxrl.core.precision import PRESETS, Precision
from jaxrl.diagnostics import candidates
from jaxrl.diagnostics.ratio.split import LogRatio
from tests import tiny

EMPTY = LogRatio(*np.zeros((4, 1)), sequences=np.zeros(1, int))


def measurement(
    name: str, *, error: float, phantom: float, std: float, seconds=None
) -> Measurement:
    numbers = {
        "beta": 0.0,
        "beta_std": std,
        "beta_p99": 3 * std,
        "phantom": phantom,
        "token_mult_error": error,
        "dtype_std": std,
        "engine_std": 0.0,
        "shape_noise_std": 0.0,
    }
    timed = {} if seconds is None else {"seconds_per_step": seconds}
    return Measurement(name, "embedded f32", numbers | timed, EMPTY, {})


EXACT = measurement("exact", error=1.0, phantom=0, std=1e-6, seconds=2.0)
QUICK = measurement("quick", error=1.001, phantom=0, std=1e-3, seconds=1.0)
NEARLY = measurement("nearly", error=1.002, phantom=0, std=2e-3, seconds=0.95)
WRONG = measurement("wrong", error=1.02, phantom=0.01, std=3e-2, seconds=0.1)


def test_fastest_good_precision_is_recommended():
    advice = recommend([EXACT, QUICK, NEARLY, WRONG])
    assert "'quick'" in advice
    assert "exact, nearly would also work" in advice
    assert "1.0010" in advice
    assert "'exact'" in recommend([EXACT, WRONG])
    untimed = [f._replace(numbers={k: v for k, v in f.numbers.items() if k != "seconds_per_step"})
               for f in (QUICK, EXACT)]  # fmt: skip
    assert "'exact'" in recommend(untimed)


def test_best_precision_is_named_with_a_remedy():
    worse = measurement("worse", error=1.2, phantom=0.2, std=0.3)
    overflows = measurement("overflows", error=float("nan"), phantom=0, std=float("nan"))
    advice = recommend([overflows, worse, WRONG])
    assert "No precision is good" in advice
    assert "wrong has the smallest beta" in advice
    assert "clip 1.00 % of tokens" in advice
    assert "shadowed" in advice


def test_table_has_a_line_for_each_precision():
    lines = table([EXACT, WRONG]).splitlines()
    assert [line.split()[0] for line in lines] == ["precision", "exact", "wrong"]
    assert "1.00 %" in lines[2]
    assert len({len(line) for line in lines}) == 1


def test_list_of_precisions_may_change_roles():
    overrides = [("model.path", "m"), ("precisions", "fp32,bf16_master,logits=bf16,wire=f32,fp32")]
    found = toml_file.load(DoctorConfig, overrides=overrides).precisions
    assert found == ("fp32", "bf16_master,logits=bf16,wire=f32")
    with pytest.raises(toml_file.ConfigError, match="no preset 'fp17'"):
        toml_file.load(DoctorConfig, overrides=[("model.path", "m"), ("precisions", "fp17")])


def test_settings_of_the_server_remove_parts():
    """Those that differ from the learner's, each with the parts that it removes."""
    parts = {"weights": 0.1, "products": 0.2, "cache": 0.1, "head": 0.35, "blocks": 0.25}
    shares = {f"{name}_share": share for name, share in parts.items()}
    own = Precision.parse("fp32,wire=bf16,sampler=bf16")
    served = dataclasses.replace(own, logits=jnp.dtype(jnp.bfloat16), blocks="int8")
    lines = [line.split("  ") for line in server_settings(shares, own, served).splitlines()]
    found = {line[0]: [text.strip() for text in line[1:] if text] for line in lines[1:]}
    assert found == {
        "--logits f32": ["head", "35.0 %"],
        "--blocks none": ["blocks", "25.0 %"],
        "--dtype f32": ["weights, products, cache", "40.0 %"],
    }
    alike = Precision.parse("fp32")
    assert "none of its settings" in server_settings(shares, alike, alike)
    head = dataclasses.replace(alike, logits=jnp.dtype(jnp.bfloat16))
    assert "--dtype" not in server_settings(shares, alike, head)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("doctor") / "model")


def examined(model, out, **changes) -> list[dict]:
    keys = {"prompts": 4, "sampling.max_tokens": 12, "timed_steps": 0} | changes
    given = [f"--{key}={value}" for key, value in keys.items()]
    assert main(["doctor", str(model), *given, f"--out={out}"]) == 0
    assert (out / "doctor.png").stat().st_size > 1000
    return json.loads((out / "doctor.json").read_text())["precisions"]


def test_mismatch_is_attributed_to_its_source(model, tmp_path, capsys):
    fp32, phantom = examined(model, tmp_path, precisions="fp32,phantom")
    assert "Use precision = 'fp32'" in capsys.readouterr().out
    assert (fp32["precision"], fp32["sampler"]) == ("fp32", "embedded f32")
    assert (phantom["precision"], phantom["sampler"]) == ("phantom", "embedded bf16")
    assert fp32["beta_p99"] < 1e-4
    assert fp32["dtype_std"] == 0  # learner and shadow compute the same
    assert phantom["dtype_std"] > 1e-3
    assert phantom["beta_std"] > 20 * fp32["beta_std"]
    for found in (fp32, phantom):
        assert found["dtype"] + found["engine"] == pytest.approx(found["beta"], abs=1e-7)


def test_steps_are_timed_on_request(model, tmp_path, capsys):
    (only,) = examined(model, tmp_path, precisions="fp32", timed_steps=1)
    assert only["seconds_per_step"] > 0
    assert capsys.readouterr().out.splitlines()[2].endswith("step")


def test_cheapest_precision_under_a_bound(model, tmp_path, capsys):
    keys = ["--prompts=4", "--sampling.max_tokens=12", "--precisions=fp32,phantom"]
    given = ["doctor", str(model), *keys, f"--out={tmp_path}", "--budget"]
    assert main([*given, "1e-4"]) == 0
    assert "Use precision = 'fp32'" in capsys.readouterr().out
    found = json.loads((tmp_path / "budget.json").read_text())
    assert found["cheapest"] == "fp32"
    assert {one["name"] for one in found["choices"]} == {"fp32", "phantom"}
    assert (tmp_path / "budget.png").stat().st_size > 1000
    assert main([*given, "-1"]) == 1
    assert "give nats above 0" in capsys.readouterr().err
    assert main([*given, "1e-4", "--topology=cpu:8"]) == 1
    assert "simulated devices have no rates" in capsys.readouterr().err
    assert main([*given[:-1], "--topology=v5p:1x1x1"]) == 1
    assert "--topology: it is for --budget" in capsys.readouterr().err


def test_parts_of_beta_are_shown(model, tmp_path, capsys):
    keys = ["--prompts=2", "--completions=2", "--sampling.max_tokens=8", "--precisions=phantom"]
    assert main(["doctor", str(model), "--attribute", *keys, f"--out={tmp_path}"]) == 0
    found = json.loads((tmp_path / "attribution.json").read_text())
    shares = {k.removesuffix("_share"): v for k, v in found.items() if k.endswith("_share")}
    assert sum(shares.values()) == pytest.approx(1)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert set(shares) <= {line[0] for line in lines}
    rows = {line[0]: line[1:] for line in lines}
    assert rows["beta"][1] == f"{found['whole_std']:.1e}"
    # The largest part first: the table is read from the top.
    order = [line[0] for line in lines if line[0] in shares]
    assert order == sorted(shares, key=lambda part: -shares[part])
    assert found["engine_std"] < 0.01 * found["whole_std"]  # it shares the learner's layers
    assert main(["doctor", str(model), "--attribute", "--certify", *keys]) == 1
    assert "give one of them" in capsys.readouterr().err


def test_policies_with_one_learner_share_its_step():
    shared = {
        "fp32": ("phantom", "fp32,wire=bf16", "phantom,sampler=f32", "fp32,latent=sampler"),
        "bf16_master": ("bf16_master,wire=f32", "bf16_master,sampler=f32,products=bf16x3"),
    }
    for first, others in shared.items():
        expected = learner_policy(Precision.parse(first))
        assert all(learner_policy(Precision.parse(text)) == expected for text in others)
    apart = (*PRESETS, "fp32,products=bf16x3", "bf16_master,logits=bf16", "bf16_master,grads=bf16")
    assert len({learner_policy(Precision.parse(text)) for text in apart}) == len(apart) - 1


def test_every_candidate_for_a_chip_has_a_step(model):
    config = toml_file.validate(DoctorConfig, {"model": {"path": str(model)}})
    for text in candidates("tpu", blocks=("e4m3", "int8")):
        precision = learner_policy(Precision.parse(text))
        assert planned(config, precision).precision == precision
