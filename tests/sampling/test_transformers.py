"""Greedy completions equal those of transformers' generate, token for token."""

import numpy as np
import pytest
import torch
import transformers

from jaxrl import huggingface
from jaxrl.core.precision import PRESETS
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.sampler import EmbeddedSampler

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": False}),
    "llama": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 6}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_equal_those_of_generate(family, tmp_path):
    make, settings = FAMILIES[family]
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(
        make(**SIZES | settings), attn_implementation="eager"
    ).eval()
    with torch.no_grad():  # norms and biases that change something
        for name, weight in reference.named_parameters():
            if "norm" in name or "bias" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    reference.save_pretrained(tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 96, n).astype(np.int32) for n in (1, 4, 11, 19)]
    width = max(map(len, prompts))
    tokens = np.zeros((len(prompts), width), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    seen = np.arange(width) >= width - np.array([[len(p)] for p in prompts])
    generated = reference.generate(
        torch.from_numpy(tokens),
        attention_mask=torch.from_numpy(seen.astype(np.int64)),
        do_sample=False,
        max_new_tokens=40,
    )[:, width:].numpy()

    config, params = huggingface.load(tmp_path, dtype=PRESETS["fp32"].params)
    sampler = EmbeddedSampler(decoder(config), params, precision=PRESETS["fp32"])
    greedy = SamplingParams(max_tokens=40, temperature=0, stop=tuple((t,) for t in config.eos_ids))
    for completion in sampler.sample(prompts, greedy, group_size=1):
        expected = generated[completion.prompt_index]
        np.testing.assert_array_equal(completion.tokens, expected[: len(completion.tokens)])
        assert len(completion.tokens) == 40 or completion.tokens[-1] == 1
