"""Estimates of memory and speed by arithmetic, without compiling.

Memory covers weights, gradients and optimizer state; activations need a compiled plan.
"""

import math

from jaxrl.builders.model import find_trained, trained_specs
from jaxrl.commands.plan.chips import GIB
from jaxrl.commands.plan.units import count_of, parameter_text, percent_text, size_text, time_text
from jaxrl.config.training import Config
from jaxrl.core import Precision
from jaxrl.models import lora, param_specs, parameter_count

# Share of bf16 words that changed -> share of the bytes that a store gets; docs/results/bridge.md.
_DIFFERENCES = {0.2: 0.086, 0.006: 0.0076}


def bytes_per_trained(precision: Precision) -> int:
    """Sums the bytes of a trained parameter: master weight, compute copy, gradient, moments."""
    copy = 0 if precision.compute == precision.params else precision.compute.itemsize
    once = precision.params.itemsize + precision.grads.itemsize
    return once + copy + 2 * precision.moments.itemsize


# Models of each kind, trained and frozen, that an algorithm holds: actor, critic, reference and
# reward model (arXiv:2203.02155); actor and reference (arXiv:2402.03300).
MODELS = {"PPO": 2, "GRPO": 1}


def utilisation(rollout: float, train: float, sync: float) -> tuple[float, float]:
    """Computes the learner's utilisation from the seconds of a rollout, a step and a publish.

    Returns:
      (sampling and training in turn; sampling one step behind on separate chips, where a publish
      stops both).
    """
    return train / (rollout + train + sync), train / (max(rollout, train) + sync)


def estimate(
    config: Config,
    *,
    chip_memory: float,
    link_rate: float,
    phases: tuple[float, float] | None = None,
) -> str:
    """Formats memory, publish time and the learner's utilisation.

    Args:
      config: the run's config; only the model's config.json is read.
      chip_memory: bytes.
      link_rate: bytes per second from the learner to the samplers.
      phases: seconds of a rollout and of a training step; None leaves out utilisation.

    Raises:
      FileNotFoundError, ValueError: for an unusable model or adapters.
    """
    precision = config.precision
    specs = param_specs(find_trained(config).config)
    count = parameter_count(specs)
    trained, frozen = bytes_per_trained(precision), precision.compute.itemsize
    sync = count * precision.wire.itemsize / link_rate
    lines = [
        f"{config.model.path}: {parameter_text(count)} parameters, {precision.text}: {trained} "
        f"bytes per trained parameter, {frozen} per frozen one",
        "",
        "Weights, gradients and optimizer (activations: jaxrl plan --topology)",
    ]
    sizes = {
        f"{name:5}{each} trained, {each} frozen": each * count * (trained + frozen)
        for name, each in MODELS.items()
    }
    tuned = trained_specs(config.lora, specs)
    if isinstance(tuned, lora.Adapted):
        # The reference is the frozen weights with the initial adapters.
        few = parameter_count(tuned.adapters) * (trained + frozen)
        sizes = {f"GRPO adapters of rank {config.lora.rank}": count * precision.wire.itemsize + few}
    for name, size in sizes.items():
        chips = count_of(math.ceil(size / chip_memory), "chip")
        of = f"{chip_memory / GIB:g} GiB"
        lines.append(f"  {name}{size_text(size):>14}, at least {chips} of {of}")
    lines += [
        "",
        f"Publishing {size_text(count * precision.wire.itemsize)} at {link_rate / 1e9:g} GB/s: "
        f"{time_text(sync)}",
        f"  through sampler.store (up, then down to all hosts at once): {time_text(2 * sync)}",
    ]
    lines += [
        f"    {percent_text(share)} of the words changed: {time_text(2 * sync * sent)}"
        for share, sent in _DIFFERENCES.items()
    ]
    if phases is not None:
        turns, apart = utilisation(*phases, sync)
        lines += [
            "",
            f"Learner utilisation: {percent_text(turns)} in turn with sampling, "
            f"{percent_text(apart)} with samplers one step behind on separate chips",
        ]
    return "\n".join(lines)
