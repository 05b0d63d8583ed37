"""config.json of either transformers version becomes a config; what we lack is refused by name."""

import json

import pytest
import transformers

from jaxrl.huggingface.config.convert import from_hf_config, to_hf_config
from jaxrl.models.families import DecoderConfig
from jaxrl.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from tests.models.references import DELTA, EXPERTS, FAMILIES, LLAMA3, SIZES, YARN

SCORED, SLIDING = "LlamaForSequenceClassification", "sliding_attention"
BASE = {k: v for k, v in SIZES.items() if not k.endswith("token_id")}
LLAMA3_NUMBERS = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}


def raw(model_type, **settings):
    return {"model_type": model_type, **BASE, **settings}


def gemma(model_type="gemma3_text", **settings):
    return raw(model_type, **{"hidden_act": "gelu_pytorch_tanh"} | settings)


DIRECT = {"num_key_value_heads": 4}
NESTED = {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 7.0}}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_round_trips_with_transformers(family, tmp_path):
    make, settings = FAMILIES[family]
    original = make(**SIZES | settings)
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
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert from_hf_config(raw("qwen3", rope_scaling=yarn)).rope.scaling == YarnScaling(
        factor=4.0, original_max_positions=32768
    )


def test_defaults_are_those_of_the_family():
    llama = from_hf_config({k: v for k, v in raw("llama").items() if k != "num_key_value_heads"})
    assert (llama.num_kv_heads, llama.head_dim, llama.tied) == (4, 8, False)
    assert from_hf_config(raw("qwen3")).head_dim == 128
    assert from_hf_config(raw("qwen2")).qkv_bias
    assert from_hf_config(raw("mistral")).windows == (4096,) * 3
    assert from_hf_config(raw("mistral", sliding_window=None)).windows == ()
    assert from_hf_config(raw("llama", eos_token_id=[3, 4])).eos_ids == (3, 4)


def test_a_model_without_end_tokens_names_none(tmp_path):
    config = from_hf_config(raw("llama"))
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(config, dtype="float32")))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert transformers.GenerationConfig.from_model_config(read).eos_token_id is None


def test_gemma_3_of_transformers_4():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": scaling}
    config = from_hf_config(gemma(**old, sliding_window=5, sliding_window_pattern=2))
    full, local = Rope(theta=5e5, scaling=LinearScaling(factor=8.0)), Rope(theta=300.0)
    assert (config.rope, config.ropes) == (full, (local, full, local))
    assert config.windows == (5, None, 5)
    plain = from_hf_config(gemma(layer_types=[SLIDING, "full_attention", SLIDING]))
    assert plain.ropes == (Rope(theta=1e4), Rope(theta=1e6), Rope(theta=1e4))
    assert (plain.windows, plain.head_dim, plain.tied) == ((4096, None, 4096), 256, True)
    second = from_hf_config(gemma("gemma2"))
    assert (second.score_cap, second.logit_cap, second.query_scalar) == (50.0, 30.0, 256)
    assert second.windows == (4096, None, 4096)


def test_smollm_3_has_layers_without_rope():
    config = from_hf_config(raw("smollm3", no_rope_layer_interval=2))
    assert config.ropes == (Rope(theta=2e6), None, Rope(theta=2e6))


def test_shortest_period_is_found():
    def groups(**settings) -> list[tuple[str, list[int]]]:
        config = from_hf_config(raw("qwen3_next", **settings))
        return [(group.name, list(group.layers)) for group in config.groups]

    names = ["linear_0", "linear_1", "linear_2", "full_3"]
    found = groups(num_hidden_layers=8)
    assert found == [(name, [i, i + 4]) for i, name in enumerate(names)]
    assert found == groups(num_hidden_layers=8, layer_types=None, full_attention_interval=4)
    assert groups(**DELTA) == [("linear_0", [0, 2]), ("full_1", [1, 3])]


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_positions_of_images_are_ignored_in_texts(family):
    images = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    found, expected = (
        from_hf_config(raw(family, **DELTA, rope_parameters=rope | more)) for more in (images, {})
    )
    assert found == expected


def test_qwen_windows():
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
        (raw("llama", rope_scaling={"type": "yarn", "factor": 2.0}), "original_max_position_emb"),
        (raw("llama", rope_scaling=YARN | {"beta_fast": 0}), "rope_scaling.beta_fast=0"),
        (raw("llama", rope_parameters=YARN | {"rope_theta": 1}), "rope_theta other than 1"),
        (raw("llama", rope_parameters=LLAMA3 | {"truncate": True}), "truncate is not supported"),
        (raw("llama", rope_parameters=YARN, original_max_position_embeddings=8), "=8 and"),
        (raw("llama", rope_parameters=YARN | {"llama_4_scaling_beta": 0.1}), "llama_4_scaling_be"),
        (raw("llama", rope_scaling={"type": "longrope", "factor": 2.0}), "rope type 'longrope'"),
        (raw("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope type 'dynamic'"),
        (raw("llama", rope_scaling={"rope_type": "llama3", "factor": 2.0}), "original_max_posi"),
        (raw("llama", rope_scaling={"rope_type": "linear"}), "'factor'"),
        *(
            (raw("llama", rope_scaling=kind | {"factor": 2.0}), named)
            for kind, named in (
                ({"rope_type": None}, "rope_scaling.rope_type is null"),
                ({"type": None}, "rope_scaling.type is null"),
                ({"rope_type": ""}, "rope type ''"),
                ({}, "rope_scaling.factor is not supported with the rope type 'default'"),
                ({"rope_type": "default"}, "rope_scaling.factor is not supported"),
                ({"rope_type": "linear", "type": "yarn"}, "type='yarn' contradict each other"),
                ({"rope_type": "linear", "low_freq_factor": 1.0}, "rope_scaling.low_freq_factor"),
            )
        ),
        (raw("llama", rope_parameters=[1]), r"rope_parameters=\[1\]: expected an object"),
        (raw("llama", rope_parameters="x"), "rope_parameters='x': expected an object"),
        (raw("llama", sliding_window=5), "sliding_window=5"),
        (raw("mistral", layer_types=["full_attention"] * 3), "layer_types"),
        (raw("qwen3", use_sliding_window=True, layer_types=["full_attention"]), "layer_types"),
        (raw("qwen3", use_sliding_window=True, layer_types=["chunked"] * 3), "chunked"),
        (raw("llama", num_attention_heads=3), "num_attention_heads=3"),
        (raw("llama", head_dim=7), "head_dim=7"),
        (raw("llama", hidden_size=None), "hidden_size=None"),
        (raw([]), r"model_type=\[\]"),
        ({"model_type": "llama"}, "vocab_size is missing"),
        (raw("llama", num_key_value_heads="2"), "num_key_value_heads='2'"),
        (raw("llama", num_key_value_heads=0), "num_key_value_heads=0"),
        (raw("llama", hidden_size=32.0), "hidden_size=32.0"),
        (raw("llama", vocab_size=True), "vocab_size=True"),
        (raw("llama", num_hidden_layers=10**12), "num_hidden_layers=10000"),
        (raw("llama", rms_norm_eps=float("nan")), "rms_norm_eps=nan"),
        (raw("llama", tie_word_embeddings="false"), "tie_word_embeddings='false'"),
        (raw("llama", is_causal=False), "is_causal=False"),
        (raw("llama", transformers_weights="x.safetensors"), "transformers_weights"),
        (raw("llama", architectures=["Qwen2ForCausalLM"]), "architectures=.*model_type='llama'"),
        (raw("llama", architectures=["LlamaModel"]), "architectures=.*model_type='llama'"),
        (raw("llama", architectures=[SCORED, "LlamaForCausalLM"]), "architectures"),
        (raw("llama", architectures=SCORED), "architectures='LlamaFor"),
        (raw("llama", architectures=[SCORED], id2label=[]), r"id2label=\[\]"),
        (raw("llama", architectures=[SCORED], num_labels=3), "3 labels .num_labels"),
        (raw("llama", eos_token_id=-1), "eos_token_id=-1: expected ids from 0 to 95"),
        (raw("llama", eos_token_id=[1, 96]), r"eos_token_id=\[1, 96\]: expected"),
        (raw("llama", eos_token_id=True), "eos_token_id=True"),
        (raw("llama", eos_token_id={}), "eos_token_id={}"),
        (raw("llama", rope_theta=0), "rope_theta=0"),
        (raw("llama", rope_theta="10000"), "rope_theta='10000'"),
        (raw("llama", rope_parameters=[5]), r"rope_parameters=\[5\]"),
        (raw("llama", rope_parameters={"rope_theta": 0}), "rope_parameters.rope_theta=0"),
        (raw("llama", rope_theta=7.0, rope_parameters={"rope_theta": 5.0}), "rope_theta=7.0 and"),
        (raw("llama", rope_parameters={"full_attention": {}}), "rope_parameters.full_attention"),
        (
            raw("llama", rope_scaling={"type": "linear", "factor": 2}, rope_parameters=LLAMA3),
            "rope_parameters and rope_scaling contradict",
        ),
        (raw("llama", rope_scaling={"type": "linear", "factor": 0}), "rope_scaling.factor=0"),
        (raw("llama", rope_parameters=LLAMA3 | {"low_freq_factor": 4.0}), "low_freq_factor=4.0"),
        (raw("llama", rope_parameters=LLAMA3 | {"low_freq_factor": 0}), "low_freq_factor=0"),
        (
            raw("llama", rope_parameters=LLAMA3, original_max_position_embeddings=32),
            "original_max_position_embeddings=32 and",
        ),
        (raw("mistral", sliding_window=0), "sliding_window=0"),
        (raw("qwen2", use_sliding_window=True, sliding_window=-4), "sliding_window=-4"),
        (raw("qwen2", layer_types=["sliding_attention"] * 3), "use_sliding_window=None"),
        (
            raw("qwen2", use_sliding_window=True, sliding_window=None, layer_types=[SLIDING] * 3),
            "sliding_window=None",
        ),
        (raw("qwen3", layer_types=5), "layer_types=5"),
        (raw("qwen3", layer_types=[None] * 3), "layer_types.0=None"),
        (gemma(hidden_activation="gelu"), "hidden_activation='gelu'"),
        (gemma(hidden_act="silu"), "hidden_act='silu'"),
        (gemma(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
        (gemma(final_logit_softcapping=0), "final_logit_softcapping=0"),
        (gemma(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (gemma(sliding_window=None), "sliding_window=None"),
        (gemma(rope_parameters=LLAMA3), "rope_parameters.factor is not supported for gemma3"),
        (gemma(rope_parameters=NESTED, rope_local_base_freq=5.0), "rope_local_base_freq=5.0 and"),
        (gemma(rope_parameters={"sliding_attention": YARN}), "only the rope type 'default'"),
        (gemma(rope_parameters={"sliding_attention": {"factor": 2.0}}), "sliding_attention.factor"),
        (gemma(rope_parameters={"full_attention": YARN | {"truncate": True}}), "truncate"),
        (gemma("gemma2", sliding_window_pattern=3), "sliding_window_pattern=3"),
        (gemma("gemma2", rope_parameters=NESTED), "rope_parameters.full_attention"),
        (raw("olmo3", rope_theta=1e4), "rope_theta=10000.0 without rope_parameters"),
        (raw("olmo2", clip_qkv=8.0), "clip_qkv=8.0"),
        (raw("smollm3", no_rope_layers=[1, 0]), r"no_rope_layers=\[1, 0\]: expected 3"),
        (raw("smollm3", use_sliding_window=True), "use_sliding_window=True"),
        (raw("phi3", resid_pdrop=0.1), "resid_pdrop=0.1"),
        (raw("phi3", rope_scaling=YARN), "'yarn' is not supported for phi3"),
        (raw("ministral3"), "rope_parameters, or llama_4_scaling_beta"),
        (raw("gpt_oss"), "rope_parameters, or rope_scaling, is missing"),
        (raw("gpt_oss", rope_scaling={"rope_type": "default"}), "'default' is not supported for"),
        (raw("gpt_oss", rope_scaling=YARN, attention_bias=False), "attention_bias=False"),
        (raw("gpt_oss", rope_scaling=YARN, swiglu_limit=0), "swiglu_limit=0"),
        (raw("gpt_oss", quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (raw("llama", quantization_config={"quant_method": "mxfp4"}), "quantization_config"),
        (raw("ministral3", rope_parameters=YARN), "rope_parameters, or llama_4_scaling_beta"),
        (raw("mixtral", num_local_experts=1), "num_experts_per_tok=2 is more"),
        (raw("mixtral", router_jitter_noise=0.1), "router_jitter_noise=0.1"),
        (raw("glm4_moe", n_group=3), "n_group=3 and topk_group=1: .* n_routed_experts=128"),
        (raw("glm4_moe", num_experts_per_tok=65, n_group=2), "=65 is more than the 64 experts"),
        (raw("glm4_moe", first_k_dense_replace=3), "first_k_dense_replace=3 must be less than"),
        (raw("glm4_moe", partial_rotary_factor=0.1), "partial_rotary_factor=0.1: expected a share"),
        (
            raw(
                "glm4_moe", partial_rotary_factor=1, rope_parameters={"partial_rotary_factor": 0.5}
            ),
            "partial_rotary_factor=1.0 and 0.5 in rope_parameters",
        ),
        (raw("deepseek_v3"), "num_key_value_heads=2 is not supported for deepseek_v3"),
        (raw("deepseek_v3", **DIRECT, qk_rope_head_dim=7), "qk_rope_head_dim=7 and head_dim=None"),
        (raw("deepseek_v3", **DIRECT, kv_lora_rank=None), "kv_lora_rank is missing"),
        (raw("deepseek_v3", **DIRECT, scoring_func="softmax"), "scoring_func='softmax'"),
        (raw("deepseek_v3", **DIRECT, attention_bias=True), "attention_bias=True"),
        (
            raw("qwen3_next", layer_types=[SLIDING] * 3),
            "layer_types=.*expected 3 entries, each 'fu",
        ),
        (raw("qwen3_next"), "qwen3_next needs layers of both 'full_attention' and 'linear_att"),
        (raw("qwen3_next", **DELTA | {"linear_num_value_heads": 3}), "linear_num_value_heads=3"),
        (raw("qwen3_next", **DELTA | {"linear_conv_kernel_dim": 1}), "linear_conv_kernel_dim=1"),
        (raw("qwen3_next", **DELTA | {"linear_key_head_dim": None}), "head_dim is missing"),
        (raw("qwen3_next", **DELTA, sliding_window=5), "sliding_window=5 is not supported for q"),
        (raw("qwen3_next", **DELTA, mlp_only_layers=[0]), r"mlp_only_layers=\[0\]"),
        (raw("qwen3_next", **DELTA, attention_bias=True), "attention_bias=True"),
        (
            raw("qwen3_next", **DELTA, rope_parameters={"mrope_section": [1]}),
            "mrope_section is not",
        ),
        (raw("qwen3_5_moe_text", **DELTA, norm_topk_prob=False), "norm_topk_prob=False"),
        (raw("qwen3_moe"), "num_experts, num_experts_per_tok, moe_intermediate_size is missing"),
        (raw("qwen3_moe", **EXPERTS, num_local_experts=7), "num_experts=6 and num_local_experts=7"),
        (raw("qwen3_moe", **EXPERTS | {"num_experts_per_tok": 7}), "more than the 6 experts"),
    ],
)
def test_refuses_by_name(content, named):
    with pytest.raises(ValueError, match=named):
        from_hf_config(content)
