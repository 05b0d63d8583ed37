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
from jaxrl.models.model import decoder
from jaxrl.models.scorer import token_scores
from tests import tiny

FP32 = PRESETS["fp32"]
MODEL = decoder(tiny.CONFIG)
SPECS = lora.Adapted(
    lora.adapter_specs(MODEL.specs, rank=3, targets=["*_proj"]), MODEL.specs, alpha=6.0
)
TOKENS = jax.random.randint(jax.random.key(5), (2, 7), 2, tiny.CONFIG.vocab_size)
hidden = jax.jit(partial(MODEL.hidden, precision=FP32))


# Of a reward model, whose head is trained beside the adapters.
SCORER = decoder(dataclasses.replace(tiny.CONFIG, scored=True))
SCORED = lora.Adapted(
    lora.adapter_specs(SCORER.specs, rank=3, targets=["*_proj"]), SCORER.specs, alpha=6.0
)


def forward(params):
    positions = jnp.broadcast_to(jnp.arange(7), TOKENS.shape)
    return hidden(params, TOKENS, positions, jnp.ones_like(TOKENS))


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
    np.testing.assert_array_equal(forward(new), forward(tiny.params()))
    jax.tree.map(np.testing.assert_array_equal, lora.merge(new), tiny.params())


def test_merged_and_attached_adapters_compute_the_same():
    some = adapted(seed=1)
    merged = forward(lora.merge(some))
    assert float(jnp.abs(merged - forward(tiny.params())).max()) > 0.1
    np.testing.assert_allclose(forward(some), merged, rtol=1e-4, atol=1e-4)
    a, b = (np.asarray(some.adapters["layers"][f"down_{part}"][1]) for part in "ab")
    down = np.asarray(tiny.params()["layers"]["down"][1])
    merged = lora.merge(some)["layers"]["down"][1]
    np.testing.assert_allclose(merged, down + 2.0 * b @ a, rtol=1e-5, atol=1e-6)


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
    declared = lora.adapter_specs(model.specs, rank=3, targets=["*_proj*"])
    specs = lora.Adapted(declared, model.specs, alpha=6.0)
    drawn = tiny.drawn(declared, 0)
    adapters = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + 0.1), drawn)
    some = lora.Adapted(adapters, base, alpha=6.0)
    places = jnp.broadcast_to(jnp.arange(7), TOKENS.shape)
    run = jax.jit(partial(model.hidden, precision=FP32))
    attached, merged, before = (
        run(x, TOKENS, places, jnp.ones_like(TOKENS)) for x in (some, lora.merge(some), base)
    )
    assert float(jnp.abs(merged - before).max()) > 0.1
    np.testing.assert_allclose(attached, merged, rtol=1e-4, atol=1e-4)
    peft.save_adapter(tmp_path, adapters, specs=specs, base="base", dtype=FP32.params)
    again = peft.load_adapter(tmp_path, specs, dtype=FP32.params)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)


def test_targets_choose_modules():
    specs = lora.adapter_specs(MODEL.specs, rank=2, targets=["q_proj", "[vo]_proj"])
    assert set(specs["layers"]) == {f"{name}_{part}" for name in "qvo" for part in "ab"}
    with pytest.raises(ValueError, match="'lm_head' matches no module; there are q_proj, k_proj"):
        lora.adapter_specs(MODEL.specs, rank=2, targets=["q_proj", "lm_head"])
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

    def refused(message, *, rank=3, targets=("*_proj",), alpha=6.0):
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
    ours = forward(some) @ MODEL.unembedding(some).T
    np.testing.assert_allclose(ours, logits, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(str(tmp_path / "theirs"))
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
    some = lora.Adapted(some.adapters | {"score": head}, frozen, alpha=6.0)
    peft.save_adapter(tmp_path / "ours", some.adapters, specs=SCORED, base=base, dtype=FP32.params)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    theirs = PeftModel.from_pretrained(model, str(tmp_path / "ours"))
    with torch.no_grad():
        scores = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    for params in (some, lora.merge(some)):
        ours = token_scores(forward(params), SCORER.unembedding(params), precision=FP32)[:, -1:]
        np.testing.assert_allclose(ours, scores, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    again = peft.load_adapter(tmp_path / "theirs", SCORED, dtype=FP32.params)
    jax.tree.map(np.testing.assert_array_equal, again, some.adapters)
    with pytest.raises(ValueError, match=r"modules_to_save=\['score'\].* expected None"):
        peft.load_adapter(tmp_path / "ours", SPECS, dtype=FP32.params)
