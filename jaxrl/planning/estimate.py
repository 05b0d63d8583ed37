"""The arithmetic of a reinforcement-learning system, for when compiling is not wanted.

Memory is that of weights, gradients and optimizer alone: activations need a compiled plan.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxrl import precision
from jaxrl.config.training import Config
from jaxrl.models import huggingface, spec
from jaxrl.models.decoder import param_specs
from jaxrl.precision import Precision


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


def estimate(config: Config, *, chip_memory: float, link_rate: float, phases: Phases | None) -> str:
    """PPO beside GRPO, the time of a publish and the learner's utilisation, as text.

    Args:
      config: for the model's sizes and the dtypes; only config.json is read of the model.
      chip_memory: bytes.
      link_rate: bytes per second from the learner to the samplers.
      phases: None leaves utilisation out.
    """
    policy = precision.parse(config.precision)
    specs = param_specs(huggingface.load_config(config.model.path))
    count = sum(math.prod(one.shape) for one in spec.flatten(specs).values())
    trained, frozen = bytes_per_trained(policy), policy.compute.itemsize
    sync = count * policy.wire.itemsize / link_rate
    lines = [
        f"{config.model.path}: {count / 1e9:.2f} billion parameters, {config.precision}: {trained} "
        f"bytes for a trained parameter, {frozen} for a frozen one",
        "",
        "Weights, gradients and optimizer (activations: jaxrl plan --topology)",
    ]
    for name, models in (("PPO", PPO), ("GRPO", GRPO)):
        size = models.memory(count, trained=trained, frozen=frozen)
        lines.append(
            f"  {name:5}{models.trained} trained, {models.frozen} frozen{size / 1e9:10.1f} GB, "
            f"at least {chips(size, memory=chip_memory)} chips of {chip_memory / 1e9:g} GB"
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
    return "\n".join(lines).replace("%", " %")
