"""Tiny models served by a real engine, and log-probs from transformers to compare them with."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import transformers

from jaxrl import huggingface
from jaxrl.bridge import EnginePublisher
from jaxrl.core import Precision
from jaxrl.models import DecoderConfig, Model, Params, decoder
from jaxrl.sampling import Completion, SamplingParams, TpuEngine, VllmTpuSampler
from jaxrl.sharding import PRESETS, Layout, make_mesh
from tests import tiny

QWEN3 = dataclasses.replace(tiny.CONFIG, hidden_size=64, head_dim=128, intermediate_size=128)
# Heads of 128 dimensions: those of 64 have a kernel of their own, which on_cpu does not replace.
# Without norms of queries and keys larger weights make attention so sharp that f32 is too coarse.
QWEN2 = dataclasses.replace(
    QWEN3,
    model_type="qwen2",
    hidden_size=256,
    num_heads=2,
    qk_norm=None,
    qkv_bias=True,
    initializer_range=0.05,
)
LLAMA = dataclasses.replace(QWEN2, model_type="llama", qkv_bias=False)
PROMPTS = [np.array([5, 9, 12, 33, 7]), np.array([3, 3, 41, 60]), np.array([22] * 20)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


class Served(NamedTuple):
    """A model, a learner's layout, and an engine with what samples from it and publishes to it."""

    model: Model
    layout: Layout
    engine: TpuEngine
    sampler: VllmTpuSampler
    publisher: EnginePublisher
    directory: Path

    def params(self, seed: int) -> Params:
        """Returns random parameters in the learner's layout; norms and biases are random too."""
        drawn = tiny.params(seed, config=self.model.config)
        leaves, form = jax.tree.flatten(drawn)
        keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
        moved = [
            x if x.ndim > 2 else x + 0.2 * jax.random.normal(key, x.shape)
            for x, key in zip(leaves, keys, strict=True)
        ]
        return jax.device_put(jax.tree.unflatten(form, moved), self.layout.tree(self.model.specs))

    def publish(self, params: Params, *, version: int = 1) -> None:
        self.sampler.replace(
            functools.partial(self.publisher.write, params),
            check=functools.partial(self.publisher.check, params),
            version=version,
        )

    def sample(
        self, params: SamplingParams = GREEDY, *, prompts: Any = PROMPTS, group_size: int = 1
    ) -> list[Completion]:
        """Returns the completions by prompt and number."""
        found = self.sampler.sample(prompts, params, group_size=group_size)
        return sorted(found, key=lambda one: one[:2])


def serve(
    directory: Path,
    config: DecoderConfig,
    *,
    learner: list[int],
    devices: list[int],
    precision: str = "fp32",
) -> Served:
    """Builds an engine on some devices, for a learner that is sharded over others."""
    directory.mkdir()
    tiny.write_checkpoint(directory, config=config)
    found = {device.id: device for device in jax.devices()}
    mesh = make_mesh(fsdp=len(learner), devices=[found[i] for i in learner])
    layout, model = Layout(mesh, PRESETS["fsdp"]), decoder(config)
    engine = TpuEngine(
        directory,
        devices=[found[i] for i in devices],
        dtype=Precision.of(precision).sampler,
        max_model_len=64,
        max_batch=4,
    )
    publisher = EnginePublisher(engine, model.specs, config=config, precision=precision)
    sampler = VllmTpuSampler(engine, max_positions=64, vocab_size=config.vocab_size)
    return Served(model, layout, engine, sampler, publisher, directory)


def reference(served: Served, params: Params, completions: list[Completion]) -> list[np.ndarray]:
    """Returns log-probs at temperature 1 of all tokens at each place of the completions, f64[C, V],
    by transformers from a checkpoint of the parameters."""
    directory = served.directory / "published"
    config = served.model.config
    huggingface.save(directory, jax.device_get(params), config, dtype=np.dtype(np.float32))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    found = []
    for one in completions:
        prompt = PROMPTS[one.prompt_index]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.tokens]])).logits[0]
        found.append(torch.log_softmax(logits, -1).numpy()[len(prompt) - 1 : -1])
    return found


def far(completions: list[Completion], logprobs: list[np.ndarray]) -> float:
    """Returns the largest difference between the completions' log-probs and given ones."""
    return max(
        np.abs(one.logprobs - np.take_along_axis(of, one.tokens[:, None], -1)[:, 0]).max()
        for one, of in zip(completions, logprobs, strict=True)
    )


def aligned(array: np.ndarray) -> np.ndarray:
    """Returns a copy at a multiple of 64 bytes, where a CPU device reads it in place."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
