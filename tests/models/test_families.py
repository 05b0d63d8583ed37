"""config.json of either transformers version becomes a config; what we lack is refused by name."""

import json

import pytest
import transformers

from jaxrl.models.families import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    from_hf_config,
    to_hf_config,
)
from tests.models.references import FAMILIES, LLAMA3, SIZES

BASE = {k: v for k, v in SIZES.items() if not k.endswith("token_id")}
LLAMA3_NUMBERS = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}


def raw(model_type, **settings):
    return {"model_type": model_type, **BASE, **settings}


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_transformers_writes_and_writes_what_it_reads(family, tmp_path):
    make, settings = FAMILIES[family]
    original = make(**SIZES, **settings)
    original.save_pretrained(tmp_path)
    config = from_hf_config(json.loads((tmp_path / "config.json").read_text()))
    written = to_hf_config(config, dtype="bfloat16")
    assert from_hf_config(json.loads(json.dumps(written))) == config
    again = transformers.AutoConfig.for_model(**written)
    ignored = {"dtype", "architectures", "transformers_version", "max_window_layers"}
    for key, value in original.to_dict().items():
        if key not in ignored:
            assert getattr(again, key) == value, key


def test_both_spellings_of_rope_agree():
    old = raw("llama", rope_theta=5000.0, rope_scaling=LLAMA3_NUMBERS)
    oldest = {**LLAMA3_NUMBERS, "type": LLAMA3_NUMBERS["rope_type"]}
    del oldest["rope_type"]
    new = raw("llama", rope_parameters=LLAMA3)
    configs = {from_hf_config(x) for x in (old, {**old, "rope_scaling": oldest}, new)}
    assert len(configs) == 1
    rope = configs.pop().rope
    assert rope.theta == 5000.0
    assert rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )
    linear = from_hf_config(raw("llama", rope_scaling={"type": "linear", "factor": 2}))
    assert linear.rope.scaling == LinearScaling(factor=2.0)


def test_defaults_are_those_of_the_family():
    llama = from_hf_config({k: v for k, v in raw("llama").items() if k != "num_key_value_heads"})
    assert (llama.num_kv_heads, llama.head_dim, llama.tied) == (4, 8, False)
    assert from_hf_config(raw("qwen3")).head_dim == 128
    assert from_hf_config(raw("qwen2")).qkv_bias
    assert from_hf_config(raw("mistral")).windows == (4096,) * 3
    assert from_hf_config(raw("mistral", sliding_window=None)).windows == ()
    assert from_hf_config(raw("llama", eos_token_id=[3, 4])).eos_ids == (3, 4)


def test_windows_of_qwen_follow_the_switch_the_first_layer_and_the_layer_types():
    def windows(**settings) -> DecoderConfig:
        return from_hf_config(raw("qwen2", sliding_window=5, **settings)).windows

    assert windows() == ()
    assert windows(use_sliding_window=True, max_window_layers=2) == (None, None, 5)
    assert windows(use_sliding_window=True, max_window_layers=28) == ()
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(use_sliding_window=True, layer_types=kinds) == (5, None, None)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (raw("gpt2"), "model_type='gpt2'"),
        ({**BASE}, "model_type=None"),
        (raw("llama", hidden_act="gelu"), "hidden_act='gelu'"),
        (raw("llama", attention_bias=True), "attention_bias=True"),
        (raw("qwen3", attention_bias=True), "attention_bias=True"),
        (raw("llama", mlp_bias=True), "mlp_bias=True"),
        (raw("llama", attention_dropout=0.1), "attention_dropout=0.1"),
        (raw("llama", partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (raw("llama", rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (raw("llama", quantization_config={"bits": 4}), "quantization_config"),
        (raw("llama", rope_scaling={"type": "yarn", "factor": 2.0}), "rope type 'yarn'"),
        (raw("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope type 'dynamic'"),
        (raw("llama", rope_scaling={"rope_type": "llama3", "factor": 2.0}), "original_max_posi"),
        (raw("llama", rope_scaling={"rope_type": "linear"}), "'factor'"),
        (raw("llama", sliding_window=5), "sliding_window=5"),
        (raw("mistral", layer_types=["full_attention"] * 3), "layer_types"),
        (raw("qwen3", use_sliding_window=True, layer_types=["full_attention"]), "layer_types"),
        (raw("qwen3", use_sliding_window=True, layer_types=["chunked"] * 3), "chunked"),
        (raw("llama", num_attention_heads=3), "num_attention_heads=3"),
        (raw("llama", head_dim=7), "head_dim=7"),
        (raw("llama", hidden_size=None), "hidden_size=None"),
    ],
)
def test_refuses_by_name(content, named):
    with pytest.raises(ValueError, match=named):
        from_hf_config(content)
