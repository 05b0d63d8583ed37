"""Frequencies and the attention factor of every rope type equal those of transformers."""

import json

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxrl.huggingface.config.convert import from_hf_config, to_hf_config
from jaxrl.models.rope import attention_factor, rope_frequencies
from tests.models.references import LLAMA3, SIZES

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
TABLES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn of gpt-oss": YARN
    | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False}
    | {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn of OLMo 3": YARN | {"attention_factor": 1.2079441541679836, "beta_fast": 32},
    "yarn of DeepSeek": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn of one temperature": YARN | {"mscale": 1.0},
    "yarn over few pairs": YARN | {"original_max_position_embeddings": 8, "beta_slow": 2.0},
    "yarn that stretches none": YARN | {"factor": 1.0},
}


@pytest.mark.parametrize("name", TABLES)
def test_frequencies_and_factor_equal_those_of_transformers(name):
    kind = TABLES[name]["rope_type"]
    reference = transformers.Qwen3Config(**SIZES, head_dim=64, rope_parameters=dict(TABLES[name]))
    expected, factor = ROPE_INIT_FUNCTIONS[kind](reference, "cpu")
    config = from_hf_config(json.loads(reference.to_json_string()))
    found = rope_frequencies(config.rope, head_dim=64)
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-7)
    assert attention_factor(config.rope) == pytest.approx(factor, rel=1e-12)
    written = to_hf_config(config, dtype="float32")
    assert from_hf_config(written).rope == config.rope
    assert written["rope_scaling"] | {"rope_theta": config.rope.theta} == TABLES[name]
