"""The keys of the service that contradict each other."""

import pytest

from jaxrl.config.tinker import TinkerConfig
from jaxrl.config.toml_file import ConfigError, validate


def test_the_service_refuses_numbers_of_e4m3_on_servers():
    keys = {"precision": "bf16_master,blocks=e4m3"}
    validate(TinkerConfig, keys)
    with pytest.raises(ConfigError, match="'vllm': blocks=e4m3 applies to sampler = 'embedded'"):
        validate(TinkerConfig, keys | {"sampler": "vllm"})
    validate(TinkerConfig, {"precision": "bf16_master,blocks=int8", "sampler": "vllm"})


def test_the_service_refuses_fixed_sums_that_would_not_hold():
    validate(TinkerConfig, {"precision": "fp32,sums=fixed"})
    with pytest.raises(ConfigError, match="sums=fixed applies to sampler = 'embedded' only"):
        validate(TinkerConfig, {"precision": "fp32,sums=fixed", "sampler": "vllm"})
    with pytest.raises(ConfigError, match="sampler = bf16, so that ratios"):
        validate(TinkerConfig, {"precision": "phantom,sums=fixed"})
