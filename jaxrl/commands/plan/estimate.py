"""The arithmetic of a reinforcement-learning system, for when compiling is not wanted.

Memory is that of weights, gradients and optimizer alone: activations need a compiled plan.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxrl.builders.model import trained_specs
from jaxrl.commands.plan.roofline import parameter_count
from jaxrl.config.training import Config
from jaxrl.core.precision import Precision
from jaxrl.models import huggingface, lora
from jaxrl.models.decoder import param_specs


def bytes_per_trained(policy: Precision) -> int:
    """Bytes that a parameter takes while it is trained: master weight, the copy that is computed
    with, gradient, two moments."""
    copy = 0 if policy.compute == policy.params else policy.compute.itemsize
    return policy.params.itemsize + copy + policy.grads.itemsize + 2 * policy.moments.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """How many models of one size a method holds."""

    trained: int
    frozen: int

    def memory(self, parameters: float, *, trained: float, frozen: float) -> float:
        """Bytes of all of them; `trained` and `frozen` are bytes per parameter."""
        return parameters * (self.trained * trained + self.frozen * frozen)


# Actor, critic, reference and reward model (arXiv:2203.02155); actor and reference
# (arXiv:2402.03300).
PPO, GRPO = Models(trained=2, frozen=2), Models(trained=1, frozen=1)


def chips(size: float, *, memory: float) -> int:
    """Fewest chips of `memory` bytes that hold `size` bytes."""
    return math.ceil(size / memory)


def utilisation(rollout: float, train: float, sync: float) -> tuple[float, float]:
    """Share of the time in which the learner's chips work.

    Args:
      rollout: seconds of sampling.
      train: seconds of a step.
      sync: seconds of a publish.

    Returns:
      (one after the other; on chips of their own with sampling one step behind, where a publish
      holds both up).
    """
    return train / (rollout + train + sync), train / (max(rollout, train) + sync)


def progress_per_time(observed: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Staleness -> improvement per unit of time, where the unit is a step at the lowest staleness.

    Args:
      observed: staleness in steps -> (improvement per step, utilisation).
    """
    base = observed[min(observed)][1]
    return {steps: gain * used / base for steps, (gain, used) in observed.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of sampling and of a step."""

    rollout: float
    train: float


def read_observed(text: str) -> dict[int, tuple[float, float]]:
    """What was observed by staleness, from a command line: "0:0.15:35,1:0.13:55" is staleness,
    improvement per step and utilisation.

    Raises:
      ValueError: if it cannot be read.
    """
    try:
        rows = [one.split(":") for one in text.split(",")]
        return {int(steps): (float(gain), float(used)) for steps, gain, used in rows}
    except ValueError:
        raise ValueError(
            f"{text!r} is not staleness:improvement:utilisation,..., such as 0:0.15:35,1:0.13:55"
        ) from None


def estimate(
    config: Config,
    *,
    chip_memory: float,
    link_rate: float,
    phases: Phases | None = None,
    observed: Mapping[int, tuple[float, float]] | None = None,
) -> str:
    """Memory, the time of a publish, the learner's utilisation and the best staleness, as text.

    Args:
      config: for the model's sizes and the dtypes; only config.json is read of the model.
      chip_memory: bytes.
      link_rate: bytes per second from the learner to the samplers.
      phases: None leaves utilisation out.
      observed: as `progress_per_time`; None leaves staleness out.

    Raises:
      FileNotFoundError, ValueError: for a model or adapters that cannot be used.
    """
    policy = config.policy
    specs = param_specs(huggingface.load_config(config.model.path))
    count = parameter_count(specs)
    trained, frozen = bytes_per_trained(policy), policy.compute.itemsize
    sync = count * policy.wire.itemsize / link_rate
    lines = [
        f"{config.model.path}: {count / 1e9:.2f} billion parameters, {config.precision}: {trained} "
        f"bytes for a trained parameter, {frozen} for a frozen one",
        "",
        "Weights, gradients and optimizer (activations: jaxrl plan --topology)",
    ]
    sizes = {
        f"{name:5}{models.trained} trained, {models.frozen} frozen": models.memory(
            count, trained=trained, frozen=frozen
        )
        for name, models in (("PPO", PPO), ("GRPO", GRPO))
    }
    held = trained_specs(config.lora, specs)
    if isinstance(held, lora.Adapted):
        # The reference is the frozen weights with the adapters as they began.
        few = GRPO.memory(parameter_count(held.adapters), trained=trained, frozen=frozen)
        sizes = {f"GRPO adapters of rank {config.lora.rank}": count * policy.wire.itemsize + few}
    for name, size in sizes.items():
        lines.append(
            f"  {name}{size / 1e9:10.1f} GB, at least {chips(size, memory=chip_memory)} chips of "
            f"{chip_memory / 1e9:g} GB"
        )
    lines += [
        "",
        f"Publishing {count * policy.wire.itemsize / 1e9:.1f} GB at {link_rate / 1e9:g} GB/s: "
        f"{sync:.1f} s",
    ]
    if phases is not None:
        turns, apart = utilisation(phases.rollout, phases.train, sync)
        lines += [
            "",
            f"The learner works {turns:.0%} of the time in turns with sampling, {apart:.0%} with "
            "samplers one step behind on chips of their own",
        ]
    if observed is not None:
        found = progress_per_time(observed)
        best = max(found, key=lambda steps: found[steps])
        lines += [
            "",
            "Improvement per unit of time by staleness, where the unit is a step at the lowest one",
            *(f"  {steps:3}{gain:10.3f}" for steps, gain in sorted(found.items())),
            f"  best: rollouts.max_staleness = {best}",
        ]
    return "\n".join(lines).replace("%", " %")
