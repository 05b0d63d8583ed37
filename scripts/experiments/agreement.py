"""Compares the embedded sampler's log-probs with the learner's, weights unmoved, as a table.

python scripts/experiments/agreement.py [--families qwen3 llama] [--top_p 0.95]

Random models: 4 layers of width 128, 12 prompts x 2 completions of 96 tokens at temperature 1. A
cell is the standard deviation of learner - sampler and the share of tokens that are bitwise equal.
A mixture of experts has a second row, in which the learner replays the sampler's experts.
"""

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from jaxrl.core import MinibatchShape, Precision, jit, most_kept, pack_minibatch, unpack
from jaxrl.environments import as_rollout
from jaxrl.huggingface import from_hf_config
from jaxrl.learner import make_learner
from jaxrl.losses import grpo
from jaxrl.models import Model, Params, decoder, init, sequence_alignment
from jaxrl.sampling import EmbeddedSampler, SamplingParams

PRECISIONS = ("fp32", "bf16_master", "fp16_master")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
}


def make_model(family: str) -> tuple[Model, Params]:
    """Makes a random model with logits as far apart as a trained model's."""
    settings = {
        "model_type": family,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.06,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "eos_token_id": 1,
        "hidden_act": "silu",
    }
    model = decoder(from_hf_config(settings | FAMILIES[family]))
    params = init(model.specs, jax.random.key(0), dtype=Precision.parse("fp32").params)
    return model, {**params, "head": 3 * params["head"]}


def differences(
    model: Model, params: Params, precision: Precision, *, replay_routing: bool, top_p: float
) -> np.ndarray:
    """Samples, scores, and returns learner - sampler of every token."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 512, rng.integers(5, 40)).astype(np.int32) for _ in range(12)]
    sampler = EmbeddedSampler(
        model,
        params,
        precision=precision,
        max_batch=32,
        record_experts=replay_routing,
        record_kept=True,
    )
    asked = SamplingParams(max_tokens=96, top_p=top_p, seed=1)
    if asked.truncated:
        asked = dataclasses.replace(asked, top_k=most_kept(model.config.vocab_size))
    rollouts = [
        as_rollout(c, prompts[c.prompt_index], group=c.prompt_index)
        for c in sampler.sample(prompts, asked, group_size=2)
    ]
    learner = make_learner(model, grpo().objective, optimizer=optax.sgd(1.0), precision=precision)
    shape = MinibatchShape(
        row_length=160,
        rows_per_microbatch=4,
        max_rows=len(rollouts),
        align=sequence_alignment(precision),
    )
    minibatch = pack_minibatch(rollouts, [0.0] * len(rollouts), shape=shape)
    scores = np.asarray(jit(learner.score, sums=precision.sums)(params, minibatch))
    scored = unpack(scores, rollouts, shape=shape)
    return np.concatenate([s - r.logprobs for s, r in zip(scored, rollouts, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--top_p", type=float, default=1.0, help="of the sampler and the learner")
    arguments = parser.parse_args()
    families = arguments.families
    columns = [(name, sums) for name in PRECISIONS for sums in ("any", "fixed")]
    print("| family |", " | ".join(f"{name}, sums {sums}" for name, sums in columns), "|")
    rows = [(family, "") for family in families]
    rows += [(family, ", experts replayed") for family in families if family.endswith("moe")]
    for family, replayed in rows:
        model, params = make_model(family)
        cells = []
        for name, sums in columns:
            precision = dataclasses.replace(Precision.parse(name), sums=sums)
            options: Any = {"replay_routing": bool(replayed), "top_p": arguments.top_p}
            found = differences(model, params, precision, **options)
            cells.append(f"{found.std():.1e}, {100 * np.mean(found == 0):.1f} %")
        print(f"| {family}{replayed} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
