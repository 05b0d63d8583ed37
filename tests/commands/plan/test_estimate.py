"""Estimates for 70 billion parameters in bf16 on 80 GB chips, against results by hand."""

from pathlib import Path

import pytest

from jaxrl import cli
from jaxrl.commands.plan.estimate import (
    GRPO,
    PPO,
    bytes_per_trained,
    estimate,
    utilisation,
)
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core.precision import parse


def test_memory_of_ppo_and_grpo():
    ppo, grpo = (m.memory(70e9, trained=16, frozen=2) for m in (PPO, GRPO))
    assert (ppo, grpo) == (2.52e12, 1.26e12)


@pytest.mark.parametrize(
    ("policy", "expected"), [("fp32", 16), ("bf16_master", 18), ("bf16_master,moments=bf16", 14)]
)
def test_bytes_per_trained_parameter(policy, expected):
    assert bytes_per_trained(parse(policy)) == expected


def test_utilisation():
    assert utilisation(60, 40, 0) == (0.4, pytest.approx(2 / 3))
    assert utilisation(40, 40, 4) == (pytest.approx(40 / 84), pytest.approx(40 / 44))


def test_text():
    path = Path(__file__).parents[3] / "configs" / "models" / "llama3_70b"
    keys = {"model.path": str(path), "data.path": "d", "reward.path": "exact_match"}
    text = estimate(
        toml_file.load(Config, overrides=list(keys.items())),
        chip_memory=80e9,
        link_rate=50e9,
        phases=(60, 40),
    )
    assert "70.55 billion parameters" in text
    # 18 bytes for each trained parameter and 2 for each frozen one.
    assert "PPO  2 trained, 2 frozen    2822.1 GB, at least 36 chips of 80 GB" in text
    assert "GRPO 1 trained, 1 frozen    1411.1 GB, at least 18 chips of 80 GB" in text
    assert "Publishing 141.1 GB at 50 GB/s: 2.8 s" in text
    assert "through sampler.store (up, then down to all hosts at once): 5.6 s" in text
    assert "0.6 % of the words changed: 0.04 s" in text
    assert "Learner utilisation: 39 % in turn" in text


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gemma3_1b", "1.00"),
        ("gpt_oss_20b", "20.91"),
        ("glm4_5_air", "106.85"),
        ("moonlight_16b_a3b", "15.96"),
        ("mixtral_8x7b", "46.70"),
        ("olmo3_7b", "7.30"),
        ("qwen3_next_80b_a3b", "79.67"),
        ("qwen3_5_9b", "8.95"),
        ("phi4", "14.66"),
        ("smollm3_3b", "3.08"),
    ],
)
def test_every_family_has_as_many_parameters_as_published(name, billions):
    path = Path(__file__).parents[3] / "configs" / "models" / name
    keys = {"model.path": str(path), "data.path": "d", "reward.path": "exact_match"}
    config = toml_file.load(Config, overrides=list(keys.items()))
    text = estimate(config, chip_memory=80e9, link_rate=50e9)
    assert f"{billions} billion parameters" in text


def test_adapters_need_one_copy_of_the_weights(tmp_path):
    path = Path(__file__).parents[3] / "configs" / "models" / "llama3_70b"
    keys = {"model.path": str(path), "data.path": "d", "reward.path": "exact_match"}
    adapters = {"lora.rank": "16", "lora.targets": '["q_proj"]'}
    config = toml_file.load(Config, overrides=list((keys | adapters).items()))
    text = estimate(config, chip_memory=80e9, link_rate=50e9)
    # 80 layers of 16 x (8192 + 8192), each 18 bytes trained and 2 in the reference: .4 GB.
    assert "GRPO adapters of rank 16     141.5 GB, at least 2 chips of 80 GB" in text
    assert "PPO" not in text


def test_refused_numbers():
    path = Path(__file__).parents[3] / "configs" / "models" / "qwen3_8b"
    command = ["plan", "--model.path", str(path), "--estimate"]
    for wrong in (["--rollout-seconds", "60"], ["--link", "0"]):
        with pytest.raises(SystemExit):
            cli.main([*command, *wrong])
