"""What each dtype policy would cost a run: its learner against its sampler, weights unmoved."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxrl.bridge.servers.control import VllmServer
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.prompts import rendering, sampling_params
from jaxrl.builders.sampler import SamplerNeeds, open_sampler
from jaxrl.builders.servers import api_key
from jaxrl.builders.weight_sync import Weights
from jaxrl.commands.doctor.text import Finding
from jaxrl.config.doctor import DoctorConfig
from jaxrl.config.sampler import SamplingConfig
from jaxrl.core import precision
from jaxrl.core.batch import Minibatch, Rollout, TokenBatch
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import Precision
from jaxrl.data import prompts as data
from jaxrl.learner.policy import Learner, make_learner
from jaxrl.losses.recipes import grpo
from jaxrl.models import huggingface
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.monitoring.ratio import replay
from jaxrl.monitoring.ratio.agreement import LogprobPairs, agreement_metrics
from jaxrl.sampling.base import SamplingParams
from sharding.partition import Layout


class _Material(NamedTuple):
    config: DoctorConfig
    model: Model
    params: Params  # f32
    layout: Layout
    prompts: list[np.ndarray]
    sampling: SamplingParams


class _Drawn(NamedTuple):
    """Answers, packed, and what the server says of them now; None without a server."""

    minibatch: Minibatch
    rows_per_microbatch: int
    replay: np.ndarray | None


def examine(config: DoctorConfig, *, note: Callable[[str], None]) -> list[Finding]:
    """Measures every policy of the config.

    Policies with the same sampler are measured on the same answers.

    Args:
      config: what to measure.
      note: shows a line to the user.

    Raises:
      ValueError: for a model or data that cannot be used.
      ServerFailedError, RefusedError: as `open_sampler`.
    """
    material = _material(config)
    policies = config.policies
    if config.sampler.url:
        served = np.dtype(VllmServer(config.sampler.url[0], api_key=api_key()).dtype())
        policies = {
            name: dataclasses.replace(policy, wire=served, sampler=served)
            for name, policy in policies.items()
        }
    groups: dict[Any, list[str]] = {}
    for name, policy in policies.items():
        logits = policy.logits if config.sampler.name == "embedded" else None
        groups.setdefault((policy.wire, policy.sampler, logits), []).append(name)
    findings = {}
    for names in groups.values():
        first = policies[names[0]]
        engine = "vLLM" if config.sampler.name == "vllm" else "embedded"
        sampler = f"{engine} {precision.short_name(first.sampler)}"
        note(f"{sampler}: drawing {len(material.prompts)} x {config.completions} answers")
        drawn = _draw(material, first, note=note)
        for name in names:
            note(f"{name}: scoring" + (" and timing steps" if config.timed_steps else ""))
            findings[name] = _measure(material, name, policies[name], drawn=drawn, sampler=sampler)
    return [findings[name] for name in policies]


def _material(config: DoctorConfig) -> _Material:
    layout = make_layout(config.mesh)
    path = config.model.path
    tokenizer = huggingface.load_tokenizer(path)
    sampling = sampling_params(
        SamplingConfig(max_tokens=config.sampling.max_tokens), path, tokenizer, seed=config.seed
    )
    model, params = load_model(path, layout=layout, dtype=np.dtype(np.float32), remat=config.remat)
    if config.data.path is None:
        ends = [stop[0] for stop in sampling.stop if len(stop) == 1]
        others = np.setdiff1d(np.arange(model.config.vocab_size), ends)
        rng = np.random.default_rng(config.seed)
        prompts = [rng.choice(others, 1).astype(np.int32) for _ in range(config.prompts)]
    else:
        found = data.load_prompts(
            data.read_rows(config.data.path),
            tokenizer,
            prompt_key=config.data.prompt_key,
            answer_key=None,
            rendering=rendering(config.data),
            max_tokens=config.data.max_prompt_tokens,
            limit=config.prompts,
        )
        prompts = [example.tokens for example in found.examples]
    return _Material(config, model, params, layout, prompts, sampling)


def _draw(material: _Material, policy: Precision, *, note: Callable[[str], None]) -> _Drawn:
    config, layout = material.config, material.layout
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    with open_sampler(
        config,
        Weights(material.model, material.params, 0, policy, Path(config.model.path)),
        layout=layout,
        directory=out,
        note=note,
        needs=SamplerNeeds(
            completions=min(config.sampler.max_requests, config.prompts) * config.completions
        ),
    ) as serving:
        answers = serving.sampler.sample(
            material.prompts, material.sampling, group_size=config.completions
        )
        ordered = sorted(answers, key=lambda c: (c.prompt_index, c.sample_index))
        rollouts = [
            Rollout(
                prompt=material.prompts[c.prompt_index],
                completion=c.tokens,
                logprobs=c.logprobs,
                action_mask=np.ones(len(c.tokens), bool),
                version=c.versions,
                group=c.prompt_index,
            )
            for c in ordered
        ]
        longest = max(r.length for r in rollouts)
        per_microbatch = max(1, config.microbatch_tokens // longest) * config.mesh.batch_shards
        signs = [1.0, -1.0] * len(rollouts)  # only the timed step looks at them
        minibatch = pack_minibatch(
            rollouts,
            signs[: len(rollouts)],
            shape=MinibatchShape(
                row_length=longest,
                rows_per_microbatch=per_microbatch,
                sharding=layout.batch(("batch", "length")),
            ),
        )
        replayed = None
        if serving.score is not None:
            tokens, segments = jax.device_get((minibatch.batch.tokens, minibatch.batch.segments))
            replayed = replay.replay_batch(serving.score, tokens=tokens, segments=segments)
    return _Drawn(minibatch, per_microbatch, replayed)


def _measure(
    material: _Material, name: str, policy: Precision, *, drawn: _Drawn, sampler: str
) -> Finding:
    config, batch = material.config, drawn.minibatch.batch
    low, high = config.clip_range
    params = precision.cast(material.params, policy.params)
    learner = make_learner(
        material.model,
        grpo().objective,
        optimizer=optax.adamw(1e-6),
        precision=policy,
        rows_per_microbatch=drawn.rows_per_microbatch,
        param_shardings=(
            material.layout.tree(material.model.specs) if material.layout.mesh.size > 1 else None
        ),
    )
    chosen = np.asarray(batch.action_mask) & ~np.isnan(np.asarray(batch.sampler_logprobs))
    drawn_logprobs = np.asarray(batch.sampler_logprobs)[chosen]
    scored = np.asarray(jax.jit(learner.score)(params, drawn.minibatch))[chosen]
    shadow = np.asarray(jax.jit(learner.shadow)(params, drawn.minibatch))[chosen]
    again = drawn_logprobs if drawn.replay is None else drawn.replay[chosen]
    three = replay.summarize_parts(
        replay.log_ratio_parts(learner=scored, shadow=shadow, replay=again, sampler=drawn_logprobs)
    )
    # Nothing has moved: what the third part measures is decoding. Without a server there is none.
    decoding = {k.replace("policy", "decoding"): three.pop(k) for k in [*three] if "policy" in k}
    if drawn.replay is not None:
        three |= decoding
    pairs = LogprobPairs(
        learner=scored.astype(np.float64),
        sampler=drawn_logprobs.astype(np.float64),
        sequences=np.unique(_sequences(batch)[chosen], return_inverse=True)[1],
    )
    numbers = agreement_metrics(pairs, low=low, high=high) | three
    numbers |= {"tokens": len(scored), "sequences": int(pairs.sequences.max()) + 1}
    if config.timed_steps:
        numbers["seconds_per_step"] = min(_steps(learner, params, drawn, count=config.timed_steps))
    return Finding(name, sampler, numbers, pairs)


def _sequences(batch: TokenBatch) -> np.ndarray:
    """i64[B, T], numbers of the sequences over the whole batch."""
    segments = np.asarray(batch.segments).astype(np.int64)
    return np.arange(len(segments))[:, None] * (segments.max() + 1) + segments


def _steps(learner: Learner, params: Any, drawn: _Drawn, *, count: int) -> Iterator[float]:
    """Seconds of training steps on the answers, without the compilation."""
    state = jax.jit(learner.init)(params)
    step = jax.jit(learner.step, donate_argnums=0).lower(state, drawn.minibatch).compile()
    for _ in range(count):
        start = time.perf_counter()
        state, _ = step(state, drawn.minibatch)
        jax.block_until_ready(state)
        yield time.perf_counter() - start
