"""Compares score centering from the sampler's most probable tokens with the exact term.

A server returns the log-probs of a few tokens, vLLM of 20, and `losses.score_centering` needs all
of the sampler's distribution q. The term's gradient, the sum over tokens of A E_q[grad log p], is
computed here from the first k tokens of q in two ways: the others left out, or their probability
spread over them as the learner has it.

    python scripts/top_centering.py MODEL PROMPTS --precision phantom
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiments.runs import markdown

from jaxrl.core import MinibatchShape, Precision, as_served, jit, pack_minibatch, sampler_precision
from jaxrl.environments import as_rollout
from jaxrl.huggingface import Checkpoint
from jaxrl.models import decoder
from jaxrl.sampling import EmbeddedSampler, SamplingParams

COUNTS = (1, 5, 20, 50)


def term(params, served, minibatch, *, model, precision, count, tail):
    """Returns the gradient of sum A E_q[log p] to the parameters, from `count` tokens of q."""
    batch = minibatch.batch

    def log_probs(params, precision):
        hidden = model.hidden_of(params, batch, precision=precision)
        head = model.unembedding(params).astype(jnp.float32)
        logits = jnp.einsum("btd,vd->btv", hidden.astype(jnp.float32), head, precision="highest")
        return jax.nn.log_softmax(jnp.roll(logits, 1, axis=1) / model.temperature)

    q = jnp.exp(log_probs(served, sampler_precision(precision)))
    own = jnp.exp(jax.lax.stop_gradient(log_probs(params, precision)))
    known = q >= jnp.sort(q)[..., q.shape[-1] - count][..., None]
    left, mass = (jnp.sum(jnp.where(known, 0, x), -1) for x in (q, own))
    share = tail * jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), 0)
    weights = jnp.where(known, q, own * share[..., None])

    def total(params):
        mean = jnp.sum(weights * log_probs(params, precision), axis=-1)
        return jnp.sum(jnp.where(batch.action_mask, batch.advantages * mean, 0))

    return jax.grad(total)(params), jnp.mean(
        jnp.sum(jnp.where(known, q, 0), -1), where=batch.action_mask
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--precision", default="phantom,wire=f8_e4m3")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--group", type=int, default=8)
    arguments = parser.parse_args()
    precision, checkpoint = Precision.parse(arguments.precision), Checkpoint(arguments.model)
    model = decoder(checkpoint.config)._replace(temperature=arguments.temperature)
    params = checkpoint.load(dtype=jnp.dtype(jnp.float32))
    rows = map(json.loads, arguments.prompts.read_text().splitlines()[:8])
    prompts = [np.array(checkpoint.tokenizer.encode(row["prompt"]), np.int32) for row in rows]
    sampling = SamplingParams(
        max_tokens=48,
        temperature=arguments.temperature,
        stop=tuple((end,) for end in checkpoint.end_ids),
    )
    sampler = EmbeddedSampler(model, params, precision=precision)
    drawn = sampler.sample(prompts, sampling, group_size=arguments.group)
    rollouts = [as_rollout(c, prompts[c.prompt_index], group=c.prompt_index) for c in drawn]
    # Result 1's reward, -length, against the group's mean.
    rewards = np.array([-float(r.action_mask.sum()) for r in rollouts])
    groups = np.array([r.group for r in rollouts])
    means = np.array([rewards[groups == g].mean() for g in groups])
    longest = max(r.length for r in rollouts)
    shape = MinibatchShape(row_length=longest, rows_per_microbatch=len(rollouts))
    minibatch = pack_minibatch(rollouts, list(rewards - means), shape=shape)
    served = jit(as_served, static_argnums=1)(params, precision)
    compute = functools.partial(
        jax.jit(term, static_argnames=("model", "precision")),
        params,
        served,
        minibatch,
        model=model,
        precision=precision,
    )
    exact, _ = compute(count=checkpoint.config.vocab_size, tail=False)
    norm = optax.tree.norm(exact)
    names = ("tokens of q", "their probability", "error, others left out", "error, others as p")
    lines = []
    for count in (k for k in COUNTS if k < checkpoint.config.vocab_size):
        errors = []
        for tail in (False, True):
            found, mass = compute(count=count, tail=tail)
            errors.append(optax.tree.norm(jax.tree.map(jnp.subtract, found, exact)) / norm)
        cells = (f"{count}", f"{mass:.4f}", *(f"{error:.4f}" for error in errors))
        lines.append(dict(zip(names, cells, strict=True)))
    actions = int(sum(r.action_mask.sum() for r in rollouts))
    print(f"{actions} tokens, a vocabulary of {checkpoint.config.vocab_size}\n\n{markdown(lines)}")


if __name__ == "__main__":
    main()
