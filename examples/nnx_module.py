"""GRPO on a Flax NNX decoder that knows nothing of jaxrl. The module begins with random weights and
learns to write digits. `./scripts/quickstart.sh` makes the data and the tokenizer.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxrl


class Layer(nnx.Module):
    """Attention and an MLP, each on the residual stream."""

    def __init__(self, size: int, *, heads: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(size, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(heads, size, decode=False, rngs=rngs)
        self.up = nnx.Linear(size, 4 * size, rngs=rngs)
        self.down = nnx.Linear(4 * size, size, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Computes the new residual stream, [B, T, D]."""
        x = x + self.attend(self.norms[0](x), mask=mask[:, None])
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """A decoder with learned positions and a tied head."""

    def __init__(self, vocab: int, *, size: int, layers: int, longest: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, size, rngs=rngs)
        self.places = nnx.Embed(longest, size, rngs=rngs)
        self.layers = nnx.List([Layer(size, heads=4, rngs=rngs) for _ in range(layers)])

    def hidden(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        """Computes hidden states [B, T, D]; `mask` is bool[B, T, T]."""
        x = self.embed(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return x


directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
examples = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
tokenizer = jaxrl.load(directory / "sft/model").tokenizer
module = Decoder(len(tokenizer), size=64, layers=2, longest=64, rngs=nnx.Rngs(0))
model, params = jaxrl.from_nnx(
    module,
    Decoder.hidden,  # (module, tokens, positions, mask) -> hidden states
    unembedding=lambda module: jnp.asarray(module.embed.embedding),  # tied
    max_positions=64,
)
recipe = jaxrl.grpo()
learner = jaxrl.make_learner(model, recipe.objective, optimizer=optax.adamw(3e-3))
sampler = jaxrl.EmbeddedSampler(model, params, max_batch=128)
step, state = jaxrl.jit(learner.step, donate_argnums=0), learner.init(params)


def reward(completion: str, example: dict) -> float:
    return sum(character.isdigit() for character in completion) / 12


for i in range(10):
    prompts = examples[16 * i : 16 * (i + 1)]
    asked = jaxrl.SamplingParams(max_tokens=12, seed=i)
    rollouts = jaxrl.rollouts(
        sampler, prompts, params=asked, tokenizer=tokenizer, reward=reward, group_size=8
    )
    batch = jaxrl.minibatch(rollouts, recipe.advantages)
    state, metrics = step(state, batch)
    sampler.load(state.params, version=i + 1)
    score = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    print(f"step {i + 1}: reward {score:.3f}, KL {jaxrl.to_floats(metrics)['mismatch/kl']:.1e}")
