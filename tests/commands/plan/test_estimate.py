"""Estimates for 70 billion parameters in bf16 on chips of 80 GiB, against results by hand."""

from pathlib import Path

import pytest

from jaxrl import cli, huggingface
from jaxrl.commands.plan.estimate import bytes_per_trained, estimate, utilisation
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core.precision import parse
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import parameter_count

MODELS = Path(__file__).parents[3] / "configs" / "models"


@pytest.mark.parametrize(
    ("text", "expected"), [("fp32", 16), ("bf16_master", 18), ("bf16_master,moments=bf16", 14)]
)
def test_bytes_per_trained_parameter(text, expected):
    assert bytes_per_trained(parse(text)) == expected


def test_utilisation():
    assert utilisation(60, 40, 0) == (0.4, pytest.approx(2 / 3))
    assert utilisation(40, 40, 4) == (pytest.approx(40 / 84), pytest.approx(40 / 44))


def test_text():
    path = MODELS / "llama3_70b"
    keys = {"model.path": str(path), "data.path": "d", "reward.path": "exact_match"}
    text = estimate(
        toml_file.load(Config, overrides=list(keys.items())),
        chip_memory=80 * 2**30,
        link_rate=50e9,
        phases=(60, 40),
    )
    assert "llama3_70b: 70.6B parameters, bf16_master: 18 bytes" in text
    # 18 bytes for each trained parameter and 2 for each frozen one.
    assert "PPO  2 trained, 2 frozen   2,628.3 GiB, at least 33 chips of 80 GiB" in text
    assert "GRPO 1 trained, 1 frozen   1,314.2 GiB, at least 17 chips of 80 GiB" in text
    assert "Publishing 131.4 GiB at 50 GB/s: 2.82 s" in text
    assert "through sampler.store (up, then down to all hosts at once): 5.64 s" in text
    assert "    20 % of the words changed: 0.485 s\n    0.6 % of the words changed: 42.9 ms" in text
    assert "Learner utilisation: 39 % in turn" in text


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gemma3_1b", 1.00),
        ("gpt_oss_20b", 20.91),
        ("glm4_5_air", 106.85),
        ("moonlight_16b_a3b", 15.96),
        ("mixtral_8x7b", 46.70),
        ("olmo3_7b", 7.30),
        ("qwen3_next_80b_a3b", 79.67),
        ("qwen3_5_9b", 8.95),
        ("qwen3_5_35b_a3b", 34.66),
        ("phi4", 14.66),
        ("smollm3_3b", 3.08),
    ],
)
def test_parameter_counts_are_as_published(name, billions):
    specs = param_specs(huggingface.Checkpoint(MODELS / name).config)
    assert round(parameter_count(specs) / 1e9, 2) == billions


def test_adapters_need_one_copy_of_the_weights(tmp_path):
    path = MODELS / "llama3_70b"
    keys = {"model.path": str(path), "data.path": "d", "reward.path": "exact_match"}
    adapters = {"lora.rank": "16", "lora.targets": '["q_proj"]'}
    config = toml_file.load(Config, overrides=list((keys | adapters).items()))
    text = estimate(config, chip_memory=80 * 2**30, link_rate=50e9)
    # 80 layers of 16 x (8192 + 8192), each 18 bytes trained and 2 in the reference: .4 GiB.
    assert "GRPO adapters of rank 16     131.8 GiB, at least 2 chips of 80 GiB" in text
    assert "PPO" not in text


def test_refused_numbers(capsys):
    path = MODELS / "qwen3_8b"
    command = ["plan", "--model.path", str(path), "--estimate"]
    both = ["--rollout-seconds", "-60", "--train-seconds", "40"]
    for wrong, said in (
        (["--rollout-seconds", "60"], "go together"),
        (["--link", "0"], "--link 0: expected a positive number"),
        (["--chip-memory", "nan"], "--chip-memory nan: expected a positive number"),
        (both, "--rollout-seconds -60: expected a positive number"),
    ):
        with pytest.raises(SystemExit):
            cli.main([*command, *wrong])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*command[:-1], "--topology", "cpu:1", *both])
    assert "--train-seconds need --estimate" in capsys.readouterr().err
