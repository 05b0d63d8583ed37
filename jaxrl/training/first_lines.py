"""The first lines of a run: model, parameters, devices, data and precision."""

from collections.abc import Sequence
from typing import Any

from jaxrl import models
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import most_kept, short_name
from jaxrl.data import length_line
from jaxrl.models import Model, lora


def first_lines(
    config: Config | SupervisedConfig,
    model: Model,
    *,
    specs: Any,
    devices: str,
    lengths: Sequence[int],
    held_out: int,
) -> list[str]:
    """Returns what a user wants to know before the first step, a line each.

    Args:
      config: the run's.
      model: the trained decoder.
      specs: of the learner's parameters, the model's or `lora.Adapted`.
      devices: the line of `attention_note`.
      lengths: tokens of each row of the training data; empty on processes that do not read it.
      held_out: number of rows of held-out data.
    """
    sizes, precision = model.config, config.precision
    count = f"{models.parameter_count(model.specs):,}, all trained"
    if isinstance(specs, lora.Adapted):
        trained = models.parameter_count(specs.adapters)
        count = f"{models.parameter_count(model.specs):,}, and {trained:,} of adapters are trained"
    data = f"data: {config.data.path}, {length_line('rows', lengths)}" if lengths else None
    lines = (
        f"model: {config.model.path} ({sizes.model_type}, {sizes.num_layers} layers)",
        f"parameters: {count}",
        f"devices: {devices}",
        data and data + f"; held out: {held_out}" * (held_out > 0),
        f"precision: {precision.text} (weights {short_name(precision.params)}, products "
        f"{short_name(precision.compute)}, sampler {short_name(precision.sampler)})",
        _kept_tokens(config, sizes.vocab_size),
    )
    return [line for line in lines if line]


def _kept_tokens(config: Config | SupervisedConfig, vocab_size: int) -> str | None:
    """Says how many tokens truncated sampling keeps, if no key of the run does."""
    most = most_kept(vocab_size)
    if not isinstance(config, Config) or not config.sampling.truncated or config.sampling.top_k:
        return None
    if most == vocab_size:
        return None
    return (
        f"sampling: keeps the {most} most probable of {vocab_size:,} tokens, as many as a record "
        "names, and of them those that sampling.top_p and min_p leave"
    )
