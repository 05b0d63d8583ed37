"""Comparison of each dtype policy's learner with its sampler at equal weights."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxrl.bridge import VllmServer, known_key
from jaxrl.builders.certificate import certified_facts
from jaxrl.builders.layout import make_layout, prepare_devices
from jaxrl.builders.model import check_precision, load_model, tpu_cost
from jaxrl.builders.prompts import load_prompts, sampling_params
from jaxrl.builders.sampler import SamplerNeeds, open_sampler
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.commands.doctor.text import Measurement
from jaxrl.config.doctor import DoctorConfig
from jaxrl.config.sampler import SamplingConfig
from jaxrl.config.toml_file import ConfigError
from jaxrl.core import (
    Minibatch,
    MinibatchShape,
    Precision,
    Rollout,
    cast,
    check_products,
    jit,
    pack_minibatch,
    short_name,
)
from jaxrl.data import read_rows
from jaxrl.diagnostics import (
    agreement_metrics,
    log_ratio_parts,
    moments,
    phantom_clips,
    replay_batch,
    shape_noise,
    split,
)
from jaxrl.environments import as_rollout
from jaxrl.huggingface import Checkpoint
from jaxrl.learner import make_learner
from jaxrl.losses import grpo
from jaxrl.models import Model, Params, choose_kernel, sequence_alignment
from jaxrl.sampling import SamplingParams
from jaxrl.sharding import Layout

_TPU_LANES = 128  # tokens; a part of a row that is no multiple has no kernel of its own
_ENGINES = {"embedded": "embedded", "vllm": "vLLM", "vllm_tpu": "vLLM's TPU engine"}


class Inputs(NamedTuple):
    """The model, the prompts and the settings of a measurement."""

    config: DoctorConfig
    checkpoint: Checkpoint
    model: Model
    params: Params  # f32
    layout: Layout
    prompts: list[np.ndarray]
    sampling: SamplingParams


class Samples(NamedTuple):
    """Completions of one sampler."""

    rollouts: list[Rollout]
    shape: MinibatchShape
    minibatch: Minibatch
    replay: np.ndarray | None  # the server's scores; None without a server
    facts: dict[str, str]  # of the sampler, if they were asked for


def examine(
    config: DoctorConfig, *, note: Callable[[str], None], facts: bool = False
) -> list[Measurement]:
    """Measures every precision of the config; those with equal samplers share their completions.
    `facts`: the measurements carry what the samplers say of themselves, for a certificate.

    Raises:
      ConfigError: for `sampler.name = "vllm_tpu"` with precisions that need several engines.
      ValueError: for an unusable model or data.
      ServerFailedError, RefusedError: see `open_sampler`.
    """
    inputs = load_inputs(config)
    precisions, served = both_policies(config)
    groups: dict[Any, list[str]] = {}
    for name, precision in served.items():
        devices = inputs.layout.mesh.devices.flat
        check_products(precision, devices[0].platform, devices=len(devices))
        settings = (precision.products, precision.sums, precision.latent, precision.blocks)
        key = (precision.wire, precision.sampler, precision.logits, *settings)
        groups.setdefault(key, []).append(name)
    if config.sampler.name == "vllm_tpu" and len(groups) > 1:
        raise ConfigError(
            f"precisions = {','.join(config.precisions)}: their samplers differ, and vLLM's TPU "
            "engine keeps its memory as long as this program runs; name one, as in --precisions "
            "bf16_master"
        )
    measurements = {}
    for names in groups.values():
        first = served[names[0]]
        sampler = f"{_ENGINES[config.sampler.name]} {short_name(first.sampler)}"
        if config.sampler.name == "vllm" and first.logits != first.sampler:
            sampler += f", head {short_name(first.logits)}"
        if first.blocks != "none":
            sampler += f", {first.blocks}"
        note(f"{sampler}: sampling {len(inputs.prompts)} x {config.completions} completions")
        samples = sample(inputs, first, note=note, facts=facts)
        for name in names:
            if inputs.layout.mesh.devices.flat[0].platform == "tpu" and (
                cost := tpu_cost(precisions[name])
            ):
                note(f"{name}: {cost}")
            note(f"{name}: scoring" + (" and timing steps" if config.timed_steps else ""))
            measurements[name] = _measure(
                inputs,
                name,
                precision=precisions[name],
                served=first,
                samples=samples,
                sampler=sampler,
            )
    return [measurements[name] for name in precisions]


def only_precision(config: DoctorConfig, option: str) -> str:
    """Returns the text of the config's one precision; raises ConfigError if there are several."""
    if len(config.precisions) == 1:
        return config.precisions[0]
    raise ConfigError(
        f"precisions = {','.join(config.precisions)}: {option} takes one; name it, as in "
        "--precisions phantom"
    )


def both_policies(config: DoctorConfig) -> tuple[dict[str, Precision], dict[str, Precision]]:
    """Returns the dtype policies of the learners, and those of their samplers, by their texts. A
    running server decides `wire`, `sampler` and, for itself alone, `logits` and `blocks`."""
    precisions = config.by_text
    if not config.sampler.url:
        return precisions, precisions
    *found, blocks = VllmServer(config.sampler.url[0], api_key=known_key()).arithmetic()
    dtype, head = map(np.dtype, found)
    own = {
        name: dataclasses.replace(precision, wire=dtype, sampler=dtype)
        for name, precision in precisions.items()
    }
    served = {"logits": head, "blocks": blocks}
    return own, {name: dataclasses.replace(one, **served) for name, one in own.items()}


def load_inputs(config: DoctorConfig) -> Inputs:
    """Loads the model and the prompts of a config."""
    prepare_devices(config.mesh, config.sampler)
    fixed = next((p for p in config.by_text.values() if p.sums == "fixed"), None)
    layout = make_layout(
        config.mesh, precision=fixed, apart={"sampler.devices": config.sampler.devices}
    )
    checkpoint = Checkpoint(config.model.path)
    for precision in config.by_text.values():
        check_precision("precisions", precision, checkpoint.config)
    sampling = sampling_params(
        SamplingConfig(max_tokens=config.sampling.max_tokens), checkpoint, seed=config.seed
    )
    if config.data.path is None:
        ends = [stop[0] for stop in sampling.stop if len(stop) == 1]
        others = np.setdiff1d(np.arange(checkpoint.config.vocab_size), ends)
        rng = np.random.default_rng(config.seed)
        prompts = [rng.choice(others, 1).astype(np.int32) for _ in range(config.prompts)]
    else:
        rows = read_rows(config.data.path, key="data.path")
        found = load_prompts(config.data, checkpoint.tokenizer, rows=rows, limit=config.prompts)
        prompts = [example.tokens for example in found.examples]
    model, params = load_model(
        checkpoint,
        layout=layout,
        dtype=np.dtype(np.float32),
        remat=config.remat,
        attention=config.attention,
    )
    return Inputs(config, checkpoint, model, params, layout, prompts, sampling)


def sample(
    inputs: Inputs, precision: Precision, *, note: Callable[[str], None], facts: bool = False
) -> Samples:
    """Samples completions of the prompts and packs them; a server scores them again."""
    config, layout = inputs.config, inputs.layout
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    with open_sampler(
        config.sampler,
        WeightRoute(inputs.model, inputs.params, 0, precision, inputs.checkpoint),
        layout=layout,
        directory=out,
        note=note,
        needs=SamplerNeeds(
            config.longest_sequence,
            config.sampling.max_batch,
            completions=min(config.sampler.max_requests, config.prompts) * config.completions,
        ),
    ) as serving:
        completions = serving.sampler.sample(
            inputs.prompts, inputs.sampling, group_size=config.completions
        )
        ordered = sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))
        rollouts = [
            as_rollout(c, inputs.prompts[c.prompt_index], group=c.prompt_index) for c in ordered
        ]
        longest = _row_length(inputs, longest=max(r.length for r in rollouts))
        per_microbatch = max(1, config.microbatch_tokens // longest) * layout.count("batch")
        signs = [1.0, -1.0] * len(rollouts)  # only the timed step reads them
        shape = MinibatchShape(
            row_length=longest,
            rows_per_microbatch=per_microbatch,
            align=sequence_alignment(precision),
            sharding=layout.batch(("batch", "length")),
        )
        minibatch = pack_minibatch(rollouts, signs[: len(rollouts)], shape=shape)
        replayed = None
        if serving.score is not None:
            tokens, segments = jax.device_get((minibatch.batch.tokens, minibatch.batch.segments))
            replayed = replay_batch(serving.score, tokens=tokens, segments=segments)
        told = serving.facts() if facts else {}
    return Samples(rollouts, shape, minibatch, replayed, told)


def _measure(
    inputs: Inputs,
    name: str,
    *,
    precision: Precision,
    served: Precision,
    samples: Samples,
    sampler: str,
) -> Measurement:
    config = inputs.config
    low, high = config.clip_range
    params = cast(inputs.params, precision.params)
    made = functools.partial(
        make_learner,
        inputs.model,
        grpo().objective,
        optimizer=optax.adamw(1e-6),
        param_shardings=inputs.layout.constraints(inputs.model.specs),
    )
    learner, compiled = made(precision=precision), functools.partial(jit, sums=precision.sums)
    learner = learner._replace(
        score=compiled(learner.score),
        shadow_scores=compiled(made(precision=served).shadow_scores),
        step=compiled(learner.step, donate_argnums=0),
    )
    parts = split(learner, samples.minibatch, params=params)
    three = log_ratio_parts(
        parts, replay=parts.sampler if samples.replay is None else samples.replay
    )
    # At equal weights the third part measures decoding. It needs a server.
    decoding = {k.replace("policy", "decoding"): three.pop(k) for k in [*three] if "policy" in k}
    if samples.replay is not None:
        three |= decoding
    tokens = parts.tokens()
    tokens = tokens._replace(shadow=tokens.sampler)  # at equal weights all of it is arithmetic
    noise = shape_noise(
        functools.partial(learner.score, params),
        samples.rollouts,
        shape=samples.shape,
        scores=parts.learner,
    )
    numbers = agreement_metrics(tokens, low=low, high=high) | three
    numbers |= phantom_clips(tokens, config.clip)
    numbers |= moments("shape_noise", noise)
    numbers |= {"tokens": len(tokens.learner), "sequences": int(tokens.sequences.max()) + 1}
    if config.timed_steps:
        numbers["seconds_per_step"] = min(
            _step_times(learner, params, samples=samples, count=config.timed_steps)
        )
    facts = certified_facts(
        samples.facts,
        precision,
        model=inputs.checkpoint.config,
        mesh=config.mesh,
        attention=choose_kernel(
            config.attention,
            layout=inputs.layout,
            config=inputs.model.config,
            precision=precision,
            length=samples.shape.row_length,
        ),
        clips=(config.clip,),
    )
    return Measurement(name, sampler, numbers, tokens, facts)


def _row_length(inputs: Inputs, *, longest: int) -> int:
    """Returns the length of rows that the devices can divide, and that a TPU's kernel can read."""
    platform = inputs.layout.mesh.devices.flat[0].platform
    multiple = inputs.config.mesh.row_shards * (_TPU_LANES if platform == "tpu" else 1)
    return -(-longest // multiple) * multiple


def _step_times(learner: Any, params: Any, *, samples: Samples, count: int) -> Iterator[float]:
    """Times training steps of a compiled learner, without compilation."""
    state = jit(learner.init)(params)
    step = learner.step.lower(state, samples.minibatch).compile()
    for _ in range(count):
        start = time.perf_counter()
        state, _ = step(state, samples.minibatch)
        jax.block_until_ready(state)
        yield time.perf_counter() - start
