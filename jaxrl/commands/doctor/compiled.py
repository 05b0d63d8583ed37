"""Costs of dtype policies on chips that are not here: a training step, compiled for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.builders.model import tpu_cost
from jaxrl.commands.plan.chips import TPUS
from jaxrl.commands.plan.command import PlanConfig
from jaxrl.commands.plan.program import compile_step
from jaxrl.commands.plan.roofline import roofline
from jaxrl.commands.plan.topology import Topology
from jaxrl.commands.plan.units import time_text
from jaxrl.config import toml_file
from jaxrl.config.doctor import DoctorConfig
from jaxrl.core import Precision


def compiled_costs(
    config: DoctorConfig, topology: Topology, *, note: Callable[[str], None]
) -> dict[str, float]:
    """Compiles the step of each of the config's precisions, the whole model in the largest
    minibatch, for a topology.

    Policies whose learners compute alike share a program. One that the compiler refuses, or that
    does not fit into the chip's memory, has no cost and a note.

    Returns:
      Seconds by the precision's text: the compiler's estimate where it has one, else the sum over
      all instructions of the time of their products or of their bytes at full rate.

    Raises:
      FileNotFoundError, ValueError, ModuleNotFoundError: as `compile_step`.
    """
    groups: dict[Precision, list[str]] = {}
    for text, precision in config.by_text.items():
        groups.setdefault(learner_policy(precision), []).append(text)
    found = {}
    for number, (precision, texts) in enumerate(groups.items(), start=1):
        if topology.name.partition(":")[0] in TPUS and (cost := tpu_cost(precision)):
            note(f"{texts[0]}: {cost}")
        title = f"{topology.name}, step {number} of {len(groups)}: {', '.join(texts)}"
        note(f"{title}: compiling")
        try:
            program = compile_step(planned(config, precision), topology)
        except ModuleNotFoundError as error:  # its second remedy is a key of runs
            raise ModuleNotFoundError(str(error).partition(", or set train.")[0]) from None
        except jax.errors.JaxRuntimeError as error:
            note(f"{title}: left out; the compiler refuses it: {str(error).splitlines()[0]}")
            continue
        if program.rejected:
            note(f"{title}: left out; the step does not fit into the chip's memory")
            continue
        times = roofline(program, topology.chip, remat=config.remat)
        seconds = times.estimated or times.instructions
        assert seconds is not None, "a chip with a data sheet has a rate"
        taken = f"compiled in {program.seconds:.0f} s, attention by {program.step.kernel}"
        note(f"{title}: {taken}, {time_text(seconds)} a step")
        found |= dict.fromkeys(texts, seconds)
    return {text: found[text] for text in config.by_text if text in found}


def learner_policy(precision: Precision) -> Precision:
    """Returns the policy without what the learner's step does not read: its dtypes of the sampler
    and the wire, and what the sampler alone computes in another way.

    Example:
      >>> phantom, fp32 = (Precision.parse(text) for text in ("phantom", "fp32"))
      >>> learner_policy(phantom) == learner_policy(fp32)
      True
    """
    narrow: dict[str, Any] = {"wire": precision.compute, "sampler": precision.compute}
    if precision.latent == "sampler":
        narrow["latent"] = "expanded"
    if precision.compute != "float32":
        narrow["products"] = "exact"
    return dataclasses.replace(precision, **narrow)


def planned(config: DoctorConfig, precision: Precision) -> PlanConfig:
    """Returns the config of a run whose largest step has all of the doctor's completions."""
    tree = {
        "run_dir": config.out,
        "model": config.model.model_dump(),
        "data": {"max_prompt_tokens": config.longest_sequence - config.sampling.max_tokens},
        "sampling": {"max_tokens": config.sampling.max_tokens},
        "sampler": {"name": "vllm"},  # no sampler of its own has to be compiled
        "train": {
            "train_batch": config.prompts,
            "group_size": config.completions,
            "microbatch_tokens": config.microbatch_tokens,
            "remat": config.remat,
            "attention": config.attention,
        },
        "mesh": config.mesh.model_dump(),
    }
    # Later, because no sampler is compiled that could refuse the policy.
    return toml_file.validate(PlanConfig, tree).model_copy(update={"precision": precision})
