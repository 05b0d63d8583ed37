"""Estimates of memory and speed by arithmetic, without compiling.

Memory covers weights, gradients and optimizer state; activations need a compiled plan.
"""

import math
from typing import NamedTuple

from jaxrl.builders.model import trained_specs
from jaxrl.config.training import Config
from jaxrl.core.precision import Precision
from jaxrl.models import huggingface, lora
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import parameter_count

# Share of bf16 words that changed -> share of the bytes that a store gets; docs/bridge.md.
_DIFFERENCES = {0.2: 0.086, 0.006: 0.0076}


def bytes_per_trained(policy: Precision) -> int:
    """Sums the bytes of a trained parameter: master weight, compute copy, gradient, moments."""
    copy = 0 if policy.compute == policy.params else policy.compute.itemsize
    return policy.params.itemsize + copy + policy.grads.itemsize + 2 * policy.moments.itemsize


class Models(NamedTuple):
    """Numbers of trained and frozen models that an algorithm holds."""

    trained: int
    frozen: int

    def memory(self, parameters: float, *, trained: float, frozen: float) -> float:
        """Counts the bytes of all models; `trained` and `frozen` are bytes per parameter."""
        return parameters * (self.trained * trained + self.frozen * frozen)


# Actor, critic, reference and reward model (arXiv:2203.02155); actor and reference
# (arXiv:2402.03300).
PPO, GRPO = Models(2, 2), Models(1, 1)


def utilisation(rollout: float, train: float, sync: float) -> tuple[float, float]:
    """Computes the learner's utilisation.

    Args:
      rollout: seconds of sampling.
      train: seconds of a step.
      sync: seconds of a publish.

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
    policy = config.policy
    specs = param_specs(huggingface.load_config(config.model.path))
    count = parameter_count(specs)
    trained, frozen = bytes_per_trained(policy), policy.compute.itemsize
    sync = count * policy.wire.itemsize / link_rate
    lines = [
        f"{config.model.path}: {count / 1e9:.2f} billion parameters, {config.precision}: {trained} "
        f"bytes per trained parameter, {frozen} per frozen one",
        "",
        "Weights, gradients and optimizer (activations: jaxrl plan --topology)",
    ]
    sizes = {
        f"{name:5}{models.trained} trained, {models.frozen} frozen": models.memory(
            count, trained=trained, frozen=frozen
        )
        for name, models in (("PPO", PPO), ("GRPO", GRPO))
    }
    tuned = trained_specs(config.lora, specs)
    if isinstance(tuned, lora.Adapted):
        # The reference is the frozen weights with the initial adapters.
        few = GRPO.memory(parameter_count(tuned.adapters), trained=trained, frozen=frozen)
        sizes = {f"GRPO adapters of rank {config.lora.rank}": count * policy.wire.itemsize + few}
    for name, size in sizes.items():
        lines.append(
            f"  {name}{size / 1e9:10.1f} GB, at least {math.ceil(size / chip_memory)} chips of "
            f"{chip_memory / 1e9:g} GB"
        )
    lines += [
        "",
        f"Publishing {count * policy.wire.itemsize / 1e9:.1f} GB at {link_rate / 1e9:g} GB/s: "
        f"{sync:.1f} s",
        f"  through sampler.store (up, then down to all hosts at once): {2 * sync:.1f} s",
    ]
    lines += [
        f"  {share:7.1%} of the words changed: {2 * sync * sent:.2f} s"
        for share, sent in _DIFFERENCES.items()
    ]
    if phases is not None:
        turns, apart = utilisation(*phases, sync)
        lines += [
            "",
            f"Learner utilisation: {turns:.0%} in turn with sampling, {apart:.0%} with samplers "
            "one step behind on separate chips",
        ]
    return "\n".join(lines).replace("%", " %")
