"""The embedded sampler's log-probs against the learner's scores of the same tokens.

Families share most of their code, so that some dtypes of some of them suffice. All families in f32,
bf16 and f16, with adapters and on meshes, take half an hour:

    JAXRL_EXACT=all pytest tests/sampling/test_exact.py tests/sampling/test_exact_mesh.py -k equal
"""

import dataclasses
import functools
import os

import jax
import numpy as np
import optax
import pytest

from jaxrl.core.compiled import jit
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import MinibatchShape, pack_minibatch, unpack
from jaxrl.core.precision import parse
from jaxrl.diagnostics.ratio.shape_noise import shape_noise
from jaxrl.environments.episodes.single_turn import as_rollout
from jaxrl.huggingface.config.convert import from_hf_config
from jaxrl.learner.policy import make_learner
from jaxrl.losses import grpo
from jaxrl.models import families, lora
from jaxrl.models.attention.blocks import sequence_alignment
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams, Turn
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from tests import tiny

TEMPERATURE = 0.8
SETTINGS = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.12,  # logits as far apart as a trained model's
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
    "eos_token_id": 1,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CORRECTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | {
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENT = {"head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32} | {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}
# Two kinds of layers that alternate: one loop of two repetitions, in which each is compiled once.
ALTERNATING = {"num_hidden_layers": 4, "sliding_window": 24}
GEMMA = ALTERNATING | {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24}
KINDS = ALTERNATING | {"layer_types": ["sliding_attention", "full_attention"] * 2}
MINISTRAL3 = {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1} | {
    "original_max_position_embeddings": 16
}
GPT_OSS = ALTERNATING | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    "swiglu_limit": 0.5,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    | {"original_max_position_embeddings": 16},
}
DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "gemma2": GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3_text": GEMMA | {"sliding_window_pattern": 2, "rope_local_base_freq": 300.0},
    "olmo2": {},
    "olmo3": KINDS | {"rope_theta": 5e5},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0] * 2},
    "ministral": KINDS,
    "ministral3": {"rope_parameters": MINISTRAL3},
    "phi3": {},
    "gpt_oss": GPT_OSS,
    "glm4_moe": CORRECTED,
    "deepseek_v3": CORRECTED | LATENT,
    # Every token has both experts: rounding does not choose others.
    "qwen3_next": EXPERTS | DELTA | {"num_experts": 2, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": EXPERTS | DELTA | {"num_experts": 2, "shared_expert_intermediate_size": 48},
}


def sampled(model, params, precision, *, max_batch=64, prompts=4, lengths=(3, 40), **truncated):
    rng = np.random.default_rng(0)
    contexts = [
        rng.integers(2, 256, rng.integers(*lengths)).astype(np.int32) for _ in range(prompts)
    ]
    sampler = EmbeddedSampler(
        model, params, precision=precision, max_batch=max_batch, record_kept=True
    )
    settings = SamplingParams(max_tokens=72, temperature=TEMPERATURE, seed=1, **truncated)
    completions = sampler.sample(contexts, settings, group_size=2)
    return [
        as_rollout(c, contexts[c.prompt_index], group=c.prompt_index)
        for c in sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))
    ]


def packed(precision, rollouts, *, row_length=112, rows=4):
    shape = MinibatchShape(
        row_length=row_length,
        rows_per_microbatch=rows,
        max_rows=len(rollouts),
        align=sequence_alignment(precision),
    )
    return shape, pack_minibatch(rollouts, [1.0] * len(rollouts), shape=shape)


def a_learner(model, precision, shardings=None):
    return make_learner(
        model._replace(temperature=TEMPERATURE),
        grpo().objective,
        optimizer=optax.sgd(1.0),
        precision=precision,
        param_shardings=shardings,
    )


def differences(model, params, precision, rollouts, *, row_length=112, rows=4):
    """The learner's log-prob minus the sampler's of every token."""
    shape, minibatch = packed(precision, rollouts, row_length=row_length, rows=rows)
    score = jit(a_learner(model, precision).score, sums=precision.sums)
    scored = unpack(np.asarray(score(params, minibatch)), rollouts, shape=shape)
    return np.concatenate([s - r.logprobs for s, r in zip(scored, rollouts, strict=True)])


@functools.cache
def a_model(family, **settings):
    config = {"model_type": family, **SETTINGS, **FAMILIES[family], **settings}
    model = decoder(from_hf_config(config), remat="matmuls")
    params = tiny.drawn(model.specs, 0)
    for group in model.config.groups:
        layers = params[group.name]
        for name, value in layers.items():
            if name.endswith("_bias"):
                layers[name] = value + 0.1 * jax.random.normal(jax.random.key(1), value.shape)
        if group.linear:  # states that remember a hundred tokens
            layers["decay"] = layers["decay"] - 5
    return model, params


@functools.cache
def rollouts_of(family, precision):
    """The rollouts of a family's model, which several tests read."""
    return sampled(*a_model(family), precision)


BOUNDS = {"fp32": 2e-6, "bf16_master": 4e-3, "fp16_master": 1.8e-3}


# What the other families add does not depend on the dtypes: one each.
IN_ALL = ("qwen3", "qwen3_moe")
IN_F32 = ("llama", "mistral", "qwen3_next", "gpt_oss")
ANOTHER = {"qwen2": "fp16_master"} | dict.fromkeys(IN_F32, "fp32")
PAIRS = [(family, name) for family in IN_ALL for name in BOUNDS]
PAIRS += [(f, ANOTHER.get(f, "bf16_master")) for f in FAMILIES if f not in IN_ALL]
PAIRS += [("deepseek_v3", "bf16_master,latent=absorbed")]
EVERY = [(f, name) for f in FAMILIES for name in BOUNDS] if "JAXRL_EXACT" in os.environ else []
# Operands in 8 bits. The width of qwen3's layers is no multiple of a block.
IN_BLOCKS = [
    ("qwen3", "bf16_master,blocks=e4m3"),
    ("qwen3", "fp32,blocks=e4m3"),
    ("qwen3_moe", "bf16_master,blocks=e4m3"),
    ("deepseek_v3", "bf16_master,blocks=e4m3,latent=absorbed"),
    ("qwen3", "bf16_master,blocks=int8"),
    ("qwen3", "fp16_master,blocks=int8"),
    ("qwen2", "fp32,blocks=int8"),
]


def test_every_family_is_tested():
    assert FAMILIES.keys() == families.FAMILIES.keys()


@pytest.mark.parametrize(("family", "name"), EVERY or PAIRS)
def test_with_fixed_sums_every_token_is_equal(family, name):
    model, params = a_model(family)
    precision = dataclasses.replace(parse(name), sums="fixed")
    rollouts = rollouts_of(family, precision)
    assert not differences(model, params, precision, rollouts).any()


@pytest.mark.parametrize(("family", "name"), IN_BLOCKS)
def test_blocks_of_8_bits_are_exact(family, name):
    wider = {"hidden_size": 192, "intermediate_size": 160} if family == "qwen3" else {}
    model, params = a_model(family, **wider)
    precision = dataclasses.replace(parse(name), sums="fixed")
    rollouts = sampled(model, params, precision, prompts=2)
    assert not differences(model, params, precision, rollouts).any()
    assert differences(model, params, dataclasses.replace(precision, blocks="none"), rollouts).any()


@pytest.mark.parametrize("blocks", ["e4m3", "int8"])
def test_adapters_in_blocks_of_8_bits_are_merged(blocks):
    model, params = adapted("qwen3")
    precision = parse(f"fp32,blocks={blocks}")
    rollouts = sampled(model, lora.merge(params), precision, prompts=2)
    noise = np.abs(differences(model, params, precision, rollouts))
    assert np.median(noise) < 1e-5


@pytest.mark.parametrize("truncated", [{"top_p": 0.95, "top_k": 32}, {"min_p": 0.1, "top_k": 5}])
def test_truncated_sampling_stays_exact(truncated):
    """It truncates logits, which are f32 in each preset."""
    model, params = a_model("qwen3")
    precision = parse("bf16_master,sums=fixed")
    rollouts = sampled(model, params, precision, **truncated)
    assert not differences(model, params, precision, rollouts).any()
    whole = [r._replace(kept=None) for r in rollouts]
    assert np.abs(differences(model, params, precision, whole)).mean() > 0.01


@functools.cache
def adapted(family):
    """A model's parameters with adapters that change every log-prob."""
    model, params = a_model(family)
    specs = lora.adapter_specs(model.specs, rank=4, targets=["*_proj"])
    adapters = tiny.drawn(specs, 1)
    rng = np.random.default_rng(2)
    adapters = jax.tree.map(lambda x: x + rng.normal(0, 0.05, x.shape).astype(np.float32), adapters)
    return model, lora.Adapted(adapters, params, alpha=8.0)


@pytest.mark.parametrize(
    ("family", "name"),
    EVERY or [*(("qwen3", name) for name in BOUNDS), ("phi3", "bf16_master")],  # phi3: fused
)
def test_adapters_are_equal(family, name):
    """The sampler serves merged weights."""
    model, params = adapted(family)
    precision = dataclasses.replace(parse(name), sums="fixed")
    rollouts = sampled(model, lora.merge(params), precision)
    assert not differences(model, params, precision, rollouts).any()


def test_gradient_of_exact_adapters():
    """It equals that of adapters beside their matrices."""
    model, params = adapted("qwen3")
    found = []
    for sums in ("any", "fixed"):
        precision = parse(f"fp32,sums={sums}")
        _, batch = packed(precision, rollouts_of("qwen3", precision), row_length=256)
        learner = a_learner(model, precision)
        after, _ = jit(learner.step, sums=sums)(learner.init(params), batch)
        found.append(tiny.difference(after.params.adapters, params.adapters))
    one, other = found
    assert tiny.norm(tiny.difference(one, other)) < 1e-5 * tiny.norm(one)


def test_fixed_sums_ignore_batch_and_packing():
    model, params = a_model("qwen3")
    precision = parse("bf16_master,sums=fixed")
    whole = rollouts_of("qwen3", precision)
    for max_batch in (1, 3):
        few = sampled(model, params, precision, max_batch=max_batch, prompts=3)
        for one, other in zip(few, whole[: len(few)], strict=True):
            np.testing.assert_array_equal(one.completion, other.completion)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
    for row_length, rows in ((112, 1), (300, 2), (257, 5)):
        found = differences(model, params, precision, whole, row_length=row_length, rows=rows)
        assert not found.any(), (row_length, rows)


def test_fixed_sums_with_window():
    model, params = a_model("mistral", max_position_embeddings=1024)
    precision = parse("bf16_master,sums=fixed")
    # The window of the first token begins in the first 512 slots, that of the last one does not.
    rollouts = sampled(model, params, precision, prompts=3, lengths=(480, 530))
    rollouts += sampled(model, params, precision, prompts=1, lengths=(900, 910))
    assert not differences(model, params, precision, rollouts, row_length=1024).any()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_moe"])
def test_fixed_sums_with_waiting_turns(family):
    model, params = a_model(family)
    precision = parse("bf16_master,sums=fixed")
    whole = rollouts_of(family, precision)
    rng = np.random.default_rng(0)
    limits = [72, *rng.integers(1, 73, len(whole) - 1)]
    turns = [
        Turn(one.prompt, one.group, i % 2, int(limit))
        for i, (one, limit) in enumerate(zip(whole, limits, strict=True))
    ]
    sampler = EmbeddedSampler(model, params, precision=precision, max_batch=4)
    settings = SamplingParams(max_tokens=72, temperature=TEMPERATURE, seed=1)
    for order in (range(len(turns)), rng.permutation(len(turns))):
        for found in sampler.sample_turns([turns[i] for i in order], settings):
            expected = whole[2 * found.prompt_index + found.sample_index]
            count = turns[2 * found.prompt_index + found.sample_index].max_tokens
            np.testing.assert_array_equal(found.tokens, expected.completion[:count])
            np.testing.assert_array_equal(found.logprobs, expected.logprobs[:count])


@pytest.mark.parametrize(
    ("family", "name"), [*(("qwen3", name) for name in BOUNDS), ("qwen3_next", "fp32")]
)
def test_fixed_sums_give_ratio_one(family, name):
    """In a step, whose program also computes the gradient."""
    model, params = a_model(family)
    precision = dataclasses.replace(parse(name), sums="fixed")
    learner = a_learner(model, precision)
    _, minibatch = packed(precision, rollouts_of(family, precision), row_length=300)
    _, metrics = jit(learner.step, sums="fixed")(learner.init(params), minibatch)
    found = to_floats(metrics)
    assert found["mismatch/token_mult_error"] == 1
    assert found["mismatch/kl"] == found["mismatch/k3_kl"] == 0


def test_fixed_sums_have_no_shape_noise():
    model, params = a_model("qwen3")
    noise = {}
    for sums in ("fixed", "any"):
        precision = parse(f"fp32,sums={sums}")
        rollouts = rollouts_of("qwen3", precision)
        shape, minibatch = packed(precision, rollouts, row_length=256)
        score = functools.partial(jit(a_learner(model, precision).score, sums=sums), params)
        scores = np.asarray(score(minibatch))
        noise[sums] = shape_noise(score, rollouts, shape=shape, scores=scores)
    assert len(noise["fixed"]) == sum(len(r.completion) for r in rollouts[:4])
    assert not noise["fixed"].any()
    assert 0 < noise["any"].std() < 1e-5


def test_fixed_sums_with_large_vocabulary():
    model, params = a_model("qwen3", vocab_size=40_001, num_hidden_layers=1)
    precision = parse("bf16_master,sums=fixed")
    rollouts = sampled(model, params, precision, prompts=2)
    assert not differences(model, params, precision, rollouts).any()


@pytest.mark.parametrize(
    ("family", "name"), [(f, name) for f, name in PAIRS if "qwen3_" in f"{f}_" and "moe" not in f]
)
def test_without_fixed_sums_the_difference_is_small(family, name):
    model, params = a_model(family)
    precision = parse(name)
    found = differences(model, params, precision, rollouts_of(family, precision))
    # Chunks and single tokens round in other places.
    assert found.std() <= BOUNDS[name] * (1 if family == "qwen3" else 4)
