"""Adapters: nothing changed at first, merged equals attached, and PEFT's format."""

import dataclasses
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.core.precision import PRESETS
from jaxrl.huggingface import peft
from jaxrl.models import lora
from jaxrl.models.logprobs import token_logprobs
from jaxrl.models.model import decoder
from jaxrl.models.output_layer import whole_logits
from jaxrl.models.scorer import token_scores
from jaxrl.sampling.base import SamplingParams, Turn
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from tests import tiny

FP32 = PRESETS["fp32"]
MODEL = decoder(tiny.CONFIG)
TARGETS = ("*_proj", "lm_head")
SPECS = lora.Adapted(
    lora.adapter_specs(MODEL.specs, rank=3, targets=TARGETS), MODEL.specs, alpha=6.0
)
TOKENS = jax.random.randint(jax.random.key(5), (2, 7), 2, tiny.CONFIG.vocab_size)
# Of a reward model, whose head is trained beside the adapters.
SCORER = decoder(dataclasses.replace(tiny.CONFIG, scored=True))
SCORED = lora.Adapted(
    lora.adapter_specs(SCORER.specs, rank=3, targets=["*_proj"]), SCORER.specs, alpha=6.0
)


@partial(jax.jit, static_argnames="model")
def forward(params, model=MODEL):
    """The logits."""
    positions = jnp.broadcast_to(jnp.arange(7), TOKENS.shape)
    hidden = model.hidden(params, TOKENS, positions, jnp.ones_like(TOKENS), precision=FP32)
    return whole_logits(hidden, model.head(params), precision=FP32)


def adapted(*, seed=None):
    """With B zero, or random if there is a seed."""
    adapters = tiny.drawn(SPECS.adapters, 0)
    if seed is not None:
        rng = np.random.default_rng(seed)
        adapters = jax.tree.map(
            lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape).astype(np.float32)), adapters
        )
    return lora.Adapted(adapters, tiny.params(), alpha=6.0)


def test_new_adapters_change_nothing():
    new = adapted()
    assert new.scale == SPECS.scale == 2.0
    assert all(np.any(x) for name, x in new.adapters["layers"].items() if name.endswith("_a"))
    base = tiny.params()
    np.testing.assert_array_equal(forward(new), forward(base))
    untied = base | {"head": base["embed"]}
    jax.tree.map(np.testing.assert_array_equal, lora.merge(new), untied)


def test_merged_and_attached_adapters_compute_the_same():
    some = adapted(seed=1)
    merged = forward(lora.merge(some))
    assert float(jnp.abs(merged - forward(tiny.params())).max()) > 0.1
    np.testing.assert_allclose(forward(some), merged, rtol=1e-4, atol=1e-4)
    a, b = (np.asarray(some.adapters["layers"][f"down_{part}"][1]) for part in "ab")
    down = np.asarray(tiny.params()["layers"]["down"][1])
    merged = lora.merge(some)["layers"]["down"][1]
    np.testing.assert_allclose(merged, down + 2.0 * b @ a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_the_output_layer_changes_it_alone(tied):
    """Log-probs, gradients and samples are those of the merged matrix, whose embedding is as it
    was."""
    config = dataclasses.replace(tiny.CONFIG, tied=tied)
    model, base = decoder(config), tiny.params(config=config)
    some = dataclasses.replace(adapted(seed=7), frozen=base)
    merged = lora.merge(some)
    np.testing.assert_array_equal(merged["embed"], base["embed"])
    change = some.adapters["head_b"] @ some.adapters["head_a"]
    np.testing.assert_allclose(merged["head"], lora.output_layer(base) + 2.0 * change, atol=1e-6)
    mask = jnp.ones(TOKENS.shape, bool)
    places = jnp.broadcast_to(jnp.arange(7), TOKENS.shape)

    @jax.jit
    def slopes(trained):
        def total(trained):
            params = trained if "embed" in trained else lora.with_trainable(some, trained)
            hidden = model.hidden(params, TOKENS, places, jnp.ones_like(TOKENS), precision=FP32)
            found = token_logprobs(hidden, model.head(params), TOKENS, mask, precision=FP32)
            return jnp.sum(jnp.sin(found)), found

        return jax.grad(total, has_aux=True)(trained)

    (beside, found), (whole, expected) = slopes(some.adapters), slopes(merged)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(close, beside, lora.of_adapters(some, whole))
    turn = Turn(np.arange(3, 8, dtype=np.int32), 0, 0, 9)
    ((mine,), (theirs,)) = (
        EmbeddedSampler(model, weights).sample_turns([turn], SamplingParams(max_tokens=9))
        for weights in (lora.attach(some), merged)
    )
    np.testing.assert_array_equal(mine.tokens, theirs.tokens)
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        tiny.GEMMA,
        tiny.PHI,
        tiny.GLM,
        tiny.DEEPSEEK,
        tiny.GPT_OSS,
        tiny.NEXT,
        tiny.QWEN3_5,
        tiny.QWEN3_5_MOE,
    ],
    ids=["gemma", "fused", "groups", "latent", "gpt_oss", "linear", "qwen3_5", "qwen3_5_moe"],
)
def test_adapters_of_all_families_round_trip(config, tmp_path):
    model, base = decoder(config), tiny.params(config=config)
    declared = lora.adapter_specs(model.specs, rank=3, targets=["*_proj*", "lm_head"])
    specs = lora.Adapted(declared, model.specs, alpha=6.0)
    drawn = tiny.drawn(declared, 0)
    adapters = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + 0.1), drawn)
    some = lora.Adapted(adapters, base, alpha=6.0)
    untied = base | {"head": lora.output_layer(base)}  # for the program of merged weights
    attached, merged, before = (forward(x, model) for x in (some, lora.merge(some), untied))
    assert float(jnp.abs(merged - before).max()) > 0.1
    np.testing.assert_allclose(attached, merged, rtol=1e-4, atol=1e-4)
    peft.save_adapter(tmp_path, adapters, specs=specs, base="base", dtype=FP32.params)
    again = peft.load_adapter(tmp_path, specs, dtype=FP32.params)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)


def test_targets_choose_modules():
    specs = lora.adapter_specs(MODEL.specs, rank=2, targets=["q_proj", "[vo]_proj"])
    assert set(specs["layers"]) == {f"{name}_{part}" for name in "qvo" for part in "ab"}
    known = r"q_proj, k_proj, .*, lm_head$"
    with pytest.raises(ValueError, match=f"'embed_tokens' matches no module; there are {known}"):
        lora.adapter_specs(MODEL.specs, rank=2, targets=["q_proj", "embed_tokens"])
    with pytest.raises(ValueError, match="'lm_head' matches no module"):
        lora.adapter_specs(SCORER.specs, rank=2, targets=["lm_head"])
    moe = lora.adapter_specs(decoder(tiny.MOE).specs, rank=2, targets=["*_proj"])
    assert set(moe["layers"]) == {f"{name}_{part}" for name in "qkvo" for part in "ab"}


def test_adapter_files_follow_peft(tmp_path):
    some = adapted(seed=2)
    peft.save_adapter(tmp_path, some.adapters, specs=SPECS, base="base", dtype=FP32.params)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    assert tensors[f"{prefix}.lora_A.weight"].shape == (3, tiny.CONFIG.intermediate_size)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (tiny.CONFIG.hidden_size, 3)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (3, 6)
    again = peft.load_adapter(tmp_path, SPECS, dtype=FP32.params)
    jax.tree.map(np.testing.assert_array_equal, again, some.adapters)

    def refused(message, *, rank=3, targets=TARGETS, alpha=6.0):
        specs = lora.adapter_specs(MODEL.specs, rank=rank, targets=targets)
        with pytest.raises(ValueError, match=message):
            peft.load_adapter(tmp_path, lora.Adapted(specs, MODEL.specs, alpha), dtype=FP32.params)

    refused("lora_alpha is 6 but lora.alpha is 5.0; set lora.alpha", alpha=5.0)
    refused("r is 3 but lora.rank is 4", rank=4)
    refused(r"do not match lora\.targets: .*down_proj", targets=["q_proj"])
    for key, value in (
        ("use_dora", True),
        ("alora_invocation_tokens", [3]),
        # PEFT loads them over a base from which it has subtracted other adapters.
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(written | {key: value}))
        refused(f"{key}={re.escape(repr(value))} is not supported")


def test_damaged_adapters_are_named(tmp_path):
    some = adapted(seed=2)
    peft.save_adapter(tmp_path, some.adapters, specs=SPECS, base="base", dtype=FP32.params)
    config, file = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    content, tensors = file.read_bytes(), load_file(file)
    name = next(iter(tensors))

    def refused(message):
        with pytest.raises(ValueError, match=message):
            peft.load_adapter(tmp_path, SPECS, dtype=FP32.params)

    for damaged in (content[:-4], content[:100], b""):
        file.write_bytes(damaged)
        refused(r"adapter_model\.safetensors is not a readable")
    for value, problem in (
        (np.full_like(tensors[name], np.nan), "not finite"),
        (tensors[name].astype(np.int32), "dtype I32"),
        (tensors[name].T.copy(), "has shape"),
    ):
        save_file(tensors | {name: value}, file)
        refused(rf"adapter_model\.safetensors: .*{problem}")
    file.rename(tmp_path / "adapter_model.bin")
    refused(r"only pickled weights .adapter_model\.bin")
    config.write_text("[]")
    refused(r"adapter_config\.json holds \[\]")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")
def test_peft_computes_the_same(tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tiny.write_checkpoint(tmp_path / "base")
    some = adapted(seed=3)
    base = str(tmp_path / "base")
    peft.save_adapter(tmp_path / "ours", some.adapters, specs=SPECS, base=base, dtype=FP32.params)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(tmp_path / "ours")
    )
    with torch.no_grad():
        logits = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    np.testing.assert_allclose(forward(some), logits, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(str(tmp_path / "copied"), save_embedding_layers=True)
    with pytest.raises(ValueError, match=r"lm_head\.base_layer\.weight, a matrix of the base"):
        peft.load_adapter(tmp_path / "copied", SPECS, dtype=FP32.params)
    theirs.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    again = peft.load_adapter(tmp_path / "theirs", SPECS, dtype=FP32.params)
    jax.tree.map(np.testing.assert_array_equal, again, some.adapters)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_reward_head_is_a_peft_saved_module(tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    tiny.write_checkpoint(tmp_path / "base")
    base = str(tmp_path / "base")
    some = adapted(seed=4)
    head = jax.random.normal(jax.random.key(6), (1, tiny.CONFIG.hidden_size))
    frozen = some.frozen | {"score": jnp.zeros_like(head)}
    some = lora.Adapted({"layers": some.adapters["layers"], "score": head}, frozen, alpha=6.0)
    places = jnp.broadcast_to(jnp.arange(7), TOKENS.shape)
    hidden = jax.jit(partial(SCORER.hidden, precision=FP32))
    peft.save_adapter(tmp_path / "ours", some.adapters, specs=SCORED, base=base, dtype=FP32.params)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    theirs = PeftModel.from_pretrained(model, str(tmp_path / "ours"))
    with torch.no_grad():
        scores = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    for params in (some, lora.merge(some)):
        x = hidden(params, TOKENS, places, jnp.ones_like(TOKENS))
        ours = token_scores(x, SCORER.unembedding(params), precision=FP32)[:, -1:]
        np.testing.assert_allclose(ours, scores, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = peft.load_adapter(tmp_path / "theirs", SCORED, dtype=FP32.params)
    jax.tree.map(np.testing.assert_array_equal, again, some.adapters)
    with pytest.raises(ValueError, match=r"modules_to_save=\['score'\].* expected None"):
        peft.load_adapter(tmp_path / "ours", SPECS, dtype=FP32.params)
