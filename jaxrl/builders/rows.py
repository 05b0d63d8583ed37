"""Chooses the rows of a run's batch: their length, and sequences with or without shared prompts."""

from typing import Any

from jaxrl.builders.model import choose_kernel
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import SHARED, Alignment, MinibatchShape
from jaxrl.losses import Need, Objective
from jaxrl.models import (
    NOT_SHARED,
    DecoderConfig,
    Kernel,
    reserves_by_run,
    sequence_alignment,
    unshared_reason,
)
from jaxrl.sharding import Layout

_BLOCK = 128  # kernels work in blocks of it, so rows are multiples of it where possible
# Times fewer tokens; with less, shared rows are slower on CPU (docs/results/scale.md).
_LEAST_SAVED = 1.75


def choose_rows(
    config: Config, sizes: DecoderConfig, *, objective: Objective, layout: Layout
) -> tuple[Config, Alignment, str]:
    """Lets the completions of a group share their prompt in a row, if the run allows it and
    attention does not cost more than sharing saves.

    Returns:
      (the config with `train.row_length`, which is kept if given; the alignment of sequences in a
      row; the choice and its reason, for the log).
    """
    kernel = choose_kernel(config, sizes, layout=layout)
    skips = kernel == "xla" and layout.mesh.devices.flat[0].platform == "cpu"
    length = _whole_groups(config) if skips else _part_of_group(config)
    shared = config
    if config.train.row_length is None:
        train = config.train.model_copy(update={"row_length": length})
        shared = config.model_copy(update={"train": train})
    longer = length > config.longest_sequence
    reason = _unshared(config, sizes, objective, kernel=kernel, longer=longer)
    reason = reason or _indivisible(shared)
    if reason is None and skips and (saved := _fewer_tokens(config)) < _LEAST_SAVED:
        reason = f"a shared one saves too little, {saved:.2f} times fewer tokens"
    if reason is not None:
        note = f"every completion computes its own prompt: {reason}"
        return config, sequence_alignment(config.precision), note
    note = f"completions of a group share their prompt, in rows of {shared.row_length} tokens"
    return shared, SHARED, note


def trained_shape(
    config: Config | SupervisedConfig, layout: Layout, *, sizes: DecoderConfig, **options: Any
) -> MinibatchShape:
    """Returns `minibatch_shape` of minibatches that the learner computes gradients of."""
    kernel, align = choose_kernel(config, sizes, layout=layout), options.get("align")
    bound = reserves_by_run(kernel, layout) and not (align and align.shared)
    return minibatch_shape(config, layout, bound_runs=bound, **options)


def minibatch_shape(
    config: Config | SupervisedConfig, layout: Layout, **options: Any
) -> MinibatchShape:
    """Returns the shape of minibatches in a run's rows; `options` are more of its fields."""
    fields: dict[str, Any] = {"align": sequence_alignment(config.precision)} | options
    return MinibatchShape(
        row_length=config.row_length,
        rows_per_microbatch=config.microbatch_rows,
        sharding=layout.batch(("batch", "length")),
        **fields,
    )


def _unshared(
    config: Config, sizes: DecoderConfig, objective: Objective, *, kernel: Kernel, longer: bool
) -> str | None:
    if not config.train.packing:
        return "train.packing = false"
    if config.precision.sums == "fixed":
        return "sums=fixed in precision, and a shared prompt has another order of sums"
    if Need.IMBALANCE in objective.needs:
        return "the loss balances experts over whole sequences, and a shared prompt is in one"
    if sizes.linear is not None:
        return NOT_SHARED
    if (reason := unshared_reason(kernel)) is not None:
        return f"attention by {reason}"
    if not (longer or config.train.row_length):
        return (
            f"several completions of {config.sampling.max_tokens} tokens behind a prompt of "
            f"{config.data.max_prompt_tokens} cost more in attention by {kernel}, or do not fit "
            f"into train.microbatch_tokens = {config.train.microbatch_tokens}"
        )
    return None


def _indivisible(shared: Config) -> str | None:
    """Names a mesh of critic or reference that does not divide rows of shared prompts, which are
    fewer and longer; other models do not score these rows."""
    for name in ("critic_mesh", "reference_mesh"):
        mesh = shared.own_meshes.get(name)
        if mesh is None:
            continue
        parts = mesh.batch_shards(shared.precision.sums), mesh.row_shards
        if shared.microbatch_rows % parts[0] or shared.row_length % parts[1]:
            return (
                f"{name} does not divide microbatches of {shared.microbatch_rows} rows of "
                f"{shared.row_length} tokens"
            )
    return None


def _fewer_tokens(config: Config) -> float:
    """Returns the factor by which a shared prompt reduces a group's tokens, at their limits."""
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_tokens
    group = config.train.group_size
    return group * (prompt + completion) / (prompt + group * (completion + 1))


def _whole_groups(config: Config) -> int:
    """Returns the row length for attention that skips invisible tokens: the whole groups that fit
    into a microbatch, or all of its tokens if none fits."""
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_tokens + 1
    group = prompt + config.train.group_size * completion
    most = config.train.microbatch_tokens
    return _rounded(config, most // group * group or most)


def _part_of_group(config: Config) -> int:
    """Returns the row length for attention that computes all earlier tokens, visible or not: the
    most completions of a group that cost no more than in separate rows, (P + n R)^2 <= n (P + R)^2.
    """
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_tokens + 1

    def row(n: int) -> int:
        return prompt + n * completion

    counts = range(1, config.train.group_size + 1)
    most = max(n for n in counts if row(n) ** 2 <= n * row(1) ** 2)
    return _rounded(config, row(most)) if most > 1 else config.longest_sequence


def _rounded(config: Config, length: int) -> int:
    """Rounds up to whole blocks and shards, within a microbatch."""
    shards, most = config.mesh.row_shards, config.train.microbatch_tokens
    for unit in (_BLOCK * shards, shards):
        if (rounded := min(-(-length // unit), most // unit) * unit) >= config.longest_sequence:
            return rounded
    return config.longest_sequence
