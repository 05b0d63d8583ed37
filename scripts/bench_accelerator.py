"""Measures jaxrl at a model's shapes, with random weights, on one accelerator, as JSON lines.

    python scripts/bench_accelerator.py learner configs/models/qwen3_0_6b
    python scripts/bench_accelerator.py sampler configs/models/qwen3_0_6b --sequences 256
    python scripts/bench_accelerator.py mismatch configs/models/qwen3_0_6b --precision fp16_master
    python scripts/benchmarks/torch_step.py configs/models/qwen3_0_6b    # the same step

`learner` times GRPO steps on packed rows of equal sequences, `sampler` completions of 256 tokens in
groups of 8, and `mismatch` compares the log-probs of learner and sampler at equal weights.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarks.timing import alternate, options, write

from jaxrl.commands.plan.roofline import forward_flops
from jaxrl.core import MinibatchShape, Precision, given_rollout, jit, pack_minibatch
from jaxrl.diagnostics import split, split_log_ratio
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import Learner, make_learner
from jaxrl.losses import grpo
from jaxrl.models import Model, Params, attend_by, choose_kernel, decoder, init
from jaxrl.sampling import EmbeddedSampler, SamplingParams
from jaxrl.sharding import PRESETS, Layout, make_mesh

PROMPT, GROUP = 256, 8
SHARPER = 5.0  # factor of the final norm: random weights become as decided as a language model


def build(arguments: Any) -> tuple[Model, Params, str]:
    """Makes the decoder, random f32 weights, and the name of its attention kernel."""
    layout, config = Layout(make_mesh(), PRESETS["fsdp"]), Checkpoint(arguments.model).config
    attend = attend_by(arguments.attention, layout=layout, config=config)
    model = decoder(config, remat=arguments.remat, attend=attend)
    params = init(model.specs, jax.random.key(0), dtype=np.dtype(np.float32))
    kernel = choose_kernel(
        arguments.attention,
        layout=layout,
        config=config,
        precision=arguments.precision,
        length=arguments.row,
    )
    return model, params, kernel


def make(model: Model, precision: str) -> Learner:
    """Makes a learner of GRPO with AdamW."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0))
    return make_learner(model, grpo().objective, optimizer=optimizer, precision=precision)


def learner(arguments: Any) -> dict[str, Any]:
    """Times steps on rows of equal sequences."""
    model, params, kernel = build(arguments)
    rng, size = np.random.default_rng(0), arguments.row // arguments.sequence
    completion, vocabulary = arguments.sequence - PROMPT, model.config.vocab_size
    tokens = rng.integers(10, vocabulary, (size * arguments.microbatches, arguments.sequence))
    rollouts = [
        given_rollout(one[:PROMPT].tolist(), one[PROMPT:].tolist())._replace(
            logprobs=rng.normal(-np.log(vocabulary), 0.1, completion)
        )
        for one in tokens
    ]
    minibatch = pack_minibatch(
        rollouts,
        list(rng.normal(size=len(rollouts))),
        shape=MinibatchShape(row_length=arguments.row, rows_per_microbatch=1),
    )
    built = make(model, arguments.precision)
    state = jit(built.init, donate_argnums=0)(
        jax.tree.map(lambda x: x.astype(Precision.parse(arguments.precision).params), params)
    )
    step = jit(built.step, donate_argnums=0).lower(state, minibatch).compile()

    def run(_: int) -> None:
        nonlocal state
        state, _metrics = step(state, minibatch)
        jax.block_until_ready(state)

    best = min(alternate({"": run}, repetitions=arguments.repetitions)[""])
    flops = (
        forward_flops(model.config, model.specs, rows=len(rollouts), length=arguments.sequence)
        - 2 * len(rollouts) * PROMPT * vocabulary * model.config.hidden_size
    )
    memory = step.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "attention": kernel,
        "GiB": held / 2**30,
        "tokens/s": tokens.size / best,
        "TFLOP/s": 3 * flops / best / 1e12,
    }


def sample(sampler: EmbeddedSampler, arguments: Any, vocabulary: int, *, seed: int) -> list[Any]:
    """Draws the completions of random prompts."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, vocabulary, (arguments.sequences // GROUP, arguments.prompt))
    params = SamplingParams(max_tokens=PROMPT, seed=seed)
    drawn = list(sampler.sample(list(prompts.astype(np.int32)), params, group_size=GROUP))
    return [(prompts[c.prompt_index].tolist(), c) for c in drawn]


def sampler(arguments: Any) -> dict[str, Any]:
    """Times whole batches of completions."""
    model, params, _ = build(arguments)
    made = EmbeddedSampler(
        model, params, precision=arguments.precision, max_batch=arguments.sequences
    )
    vocabulary = model.config.vocab_size
    seconds = alternate(
        {"": lambda seed: sample(made, arguments, vocabulary, seed=seed)},
        repetitions=arguments.repetitions,
    )[""]
    return {
        "sequences": arguments.sequences,
        "tokens/s": arguments.sequences * PROMPT / min(seconds),
    }


def mismatch(arguments: Any) -> dict[str, Any]:
    """Compares learner and sampler at equal weights, on completions of the sampler."""
    model, params, _ = build(arguments)
    params["final_norm"] *= SHARPER
    made = EmbeddedSampler(
        model, params, precision=arguments.precision, max_batch=arguments.sequences
    )
    drawn = sample(made, arguments, model.config.vocab_size, seed=0)
    made.close()
    rollouts = [
        given_rollout(prompt, c.tokens)._replace(logprobs=np.asarray(c.logprobs))
        for prompt, c in drawn
    ]
    minibatch = pack_minibatch(
        rollouts,
        list(np.random.default_rng(0).normal(size=len(rollouts))),
        shape=MinibatchShape(row_length=arguments.row, rows_per_microbatch=1),
    )
    own = Precision.parse(arguments.precision).params
    parts = split(
        make(model, arguments.precision),
        minibatch,
        params=jax.tree.map(lambda x: jnp.asarray(x, own), params),
    )
    tokens = parts.tokens()
    found = split_log_ratio(tokens, low=0.2, high=0.2)
    total = tokens.learner - tokens.sampler
    kept = ("k3_kl", "chi2_sequence", "clipped", "prob_diff_max")
    return {"std of the log-ratio": float(total.std()), **{name: found[name] for name in kept}}


def main() -> None:
    parser = options(__doc__, repetitions=4)
    works = {work.__name__: work for work in (learner, sampler, mismatch)}
    parser.add_argument("work", choices=works)
    parser.add_argument("model", type=Path, help="directory of a config.json")
    parser.add_argument("--precision", default="bf16_master")
    parser.add_argument("--remat", default="matmuls")
    parser.add_argument("--attention", default="auto", help="a kernel")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the sampler's prompts")
    parser.add_argument("--row", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=64, help="completions at once")
    arguments = parser.parse_args()
    row = {"work": arguments.work, "model": arguments.model.name, "precision": arguments.precision}
    write(row | works[arguments.work](arguments), arguments.out)


if __name__ == "__main__":
    main()
