"""What `jaxrl plan` prints."""

from collections.abc import Iterator

from jaxrl.builders.recipe import make_recipe
from jaxrl.commands.plan.program import Program
from jaxrl.commands.plan.roofline import Roofline, parameter_count, roofline
from jaxrl.commands.plan.topology import GIB, Topology
from jaxrl.config.training import Config
from jaxrl.models import lora


def report(config: Config, topology: Topology, program: Program, *, link_rate: float) -> str:
    """The plan as text; the last line says whether it fits.

    Args:
      config: what was planned.
      topology: what it was compiled for.
      program: the compiled step.
      link_rate: bytes per second from the learner to the samplers.
    """
    found = roofline(program, topology.chip, remat=config.train.remat)
    lines = [
        *_what(config, topology, program),
        *_memory(program),
        *_besides(program),
        *_time(program, found),
        *_traffic(program),
        *_publishing(program, link_rate=link_rate),
    ]
    if not fits(program, topology):
        advice = _advice(config, program, memory=topology.chip.memory)
        lines += ["", "To make it fit:", *(f"  - {line}" for line in advice)]
    left_out = _left_out(config)
    if left_out:
        lines += ["", left_out]
    last = verdict(program, topology) + ", without the critic's step" * bool(left_out)
    return "\n".join([*lines, "", last])


def phases(program: Program) -> dict[str, float]:
    """Bytes that a chip needs at once in each phase of a run."""
    return program.besides.phases(program.memory.peak)


def peak(program: Program) -> float:
    """Bytes that a chip needs at once."""
    return max(phases(program).values())


def fits(program: Program, topology: Topology) -> bool:
    """Whether every phase of the run has room on every chip."""
    return not program.refused and peak(program) <= topology.chip.memory


def verdict(program: Program, topology: Topology) -> str:
    """Such as "peak 31.4 GiB of 95.7 GiB per chip: fits"."""
    word = "fits" if fits(program, topology) else "does not fit"
    return f"peak {_gib(peak(program))} of {_gib(topology.chip.memory)} per chip: {word}"


def _what(config: Config, topology: Topology, program: Program) -> Iterator[str]:
    sizes = ", ".join(f"{axis} {n}" for axis, n in program.layout.mesh.shape.items() if n > 1)
    count = parameter_count(program.model.specs)
    yield f"{config.model.path}: {count / 1e9:.2f} billion parameters, {config.precision}"
    if isinstance(program.specs, lora.Adapted):
        trained = parameter_count(program.specs.adapters)
        yield f"adapters of rank {config.lora.rank}: {trained:,} parameters are trained"
    yield f"{topology.name}: {len(topology.devices)} chips, mesh {sizes or 'of one chip'}"
    yield (
        f"a step: {program.microbatches} x {program.rows} rows of {program.row_length} tokens at "
        f"most, remat {config.train.remat}, attention by {program.kernel}"
    )
    if program.refused:
        yield f"refused by the compiler after {program.seconds:.0f} s: it needs too much memory"
    else:
        yield f"compiled in {program.seconds:.0f} s, {program.hlo_bytes / 2**20:.1f} MiB of program"


def _left_out(config: Config) -> str:
    """What the plan does not count of a critic's step; empty without one."""
    if make_recipe(config).critic is None:
        return ""
    if config.critic.trunk == "shared":
        return (
            "Left out: the critic, whose head on the policy's trunk is one more row of parameters"
        )
    return (
        "Left out: gradients and activations of the critic, a network of its own that is trained "
        "whole; its step takes turns with the policy's"
    )


def _memory(program: Program) -> Iterator[str]:
    yield "\nMemory of a step, per chip"
    memory = program.memory
    for name, size in (
        ("parameters", memory.params),
        ("optimizer", memory.optimizer),
        ("gradients", memory.gradients),
        ("weights to compute with", memory.copies),
        ("activations, other temporaries", memory.activations),
        ("batch, metrics, program", memory.rest),
    ):
        yield f"  {name:32}{_gib(size):>12}"
    if memory.host:
        yield f"  {'in the host, of the optimizer':32}{_gib(memory.host):>12}"


def _besides(program: Program) -> Iterator[str]:
    found = program.besides
    held = (
        ("sampler's weights", found.sampler),
        ("reference", found.reference),
        ("reward model", found.reward_model),
        ("critic and its optimizer", found.critic),
    )
    if found.always:
        yield "\nHeld besides the step, per chip"
        yield from (f"  {name:32}{_gib(size):>12}" for name, size in held if size)
    if found.cache is not None:
        yield "\nWhile sampling, per chip"
        most = f"cache, {found.cache.rows} rows x {found.cache.slots}"
        yield f"  {most:32}{_gib(found.cache.size):>12}"
        yield f"  {'while it grows, besides':32}{_gib(found.cache.moving):>12}"
    yield "\nPeak per chip while"
    for phase, size in phases(program).items():
        yield f"  {phase:32}{_gib(size):>12}"


def _time(program: Program, found: Roofline) -> Iterator[str]:
    yield "\nTime of a step"
    yield f"  {'model FLOPs':32}{found.model_flops:12.3g}"
    yield f"  {'FLOPs with recomputation':32}{found.run_flops:12.3g}"
    for name, seconds in (
        ("products at the chips' peak", found.compute),
        ("memory at its full rate", found.memory),
        ("links at their full rate", found.links),
    ):
        if seconds is not None:
            yield f"  {name:32}{seconds:10.3f} s"
    low, high = found.overlapped, found.in_turn
    if low is not None and high is not None:
        tokens = program.rows * program.microbatches * program.row_length
        share = found.model_flops / found.run_flops * (found.compute or 0) / high
        yield (
            f"  roofline: {low:.3f} to {high:.3f} s, {tokens / high:,.0f} tokens/s and "
            f"{share:.0%} of peak if nothing overlaps".replace("%", " %")
        )


def _traffic(program: Program) -> Iterator[str]:
    if program.refused:
        return
    yield "\nCollectives of a step, per chip"
    for kind, traffic in program.traffic.items():
        size, sent = _gib(traffic.size), _gib(traffic.sent)
        yield f"  {kind:20}{traffic.count:7} times{size:>14}{sent:>14} sent"
    if not program.traffic:
        yield "  none"


def _publishing(program: Program, *, link_rate: float) -> Iterator[str]:
    size = parameter_count(program.model.specs) * program.policy.wire.itemsize
    yield "\nPublishing"
    yield f"  {_gib(size)}, {size / link_rate:.1f} s at {link_rate / 1e9:g} GB/s"


def _advice(config: Config, program: Program, *, memory: float) -> Iterator[str]:
    found = phases(program)
    if found.pop("learning") > memory:
        yield from _advice_for_the_step(config, program)
    if max(found.values(), default=0.0) > memory:
        yield from _advice_for_the_sampler(config, program)
    yield "more chips, and mesh.fsdp or mesh.tensor larger by as much"


def _advice_for_the_sampler(config: Config, program: Program) -> Iterator[str]:
    cache, most = program.besides.cache, config.sampling.max_batch
    if cache is not None and cache.rows > program.layout.count("batch"):
        yield f"sampling.max_batch = {max(1, most // 2)} instead of {most}: half of the cache"
    if config.sampler.rules is not None:
        yield f"no sampler.rules = {config.sampler.rules!r}: weights cut as the learner's"
    if cache is not None:
        yield "sampler.name = 'vllm', with servers on chips of their own"


def _advice_for_the_step(config: Config, program: Program) -> Iterator[str]:
    """What makes the step smaller, with the bytes of what it acts on, the largest first."""
    for size, text in sorted(_savings(config, program), key=lambda saving: -saving[0]):
        yield f"{text} (of {_gib(size)})"


def _savings(config: Config, program: Program) -> Iterator[tuple[float, str]]:
    train, memory = config.train, program.memory
    if train.remat != "layer":
        text = f"train.remat = 'layer' instead of {train.remat!r}: keeps one array for each layer"
        yield memory.activations, text
    if train.microbatch_tokens >= 2 * config.row_length:
        yield (
            memory.activations,
            f"train.microbatch_tokens = {config.row_length} instead of {train.microbatch_tokens}: "
            "one row at a time on each shard",
        )
    if config.row_length >= 8192 and config.mesh.context == 1:
        text = f"mesh.context = 2 or more: cuts the {config.row_length} tokens of a row"
        yield memory.activations, text
    if config.mesh.data > 1:
        state = memory.params + memory.optimizer + memory.gradients
        text = f"move mesh.data = {config.mesh.data} to mesh.fsdp, which cuts weights and moments"
        yield state, text
    if not config.optimizer.offload:
        text = "optimizer.offload = true: moments in the host's memory between two steps"
        yield memory.optimizer, text
    for role, size in (("moments", memory.optimizer), ("grads", memory.gradients)):
        if getattr(program.policy, role).itemsize > 2:
            yield size, f"precision = '{config.precision},{role}=bf16': half of the {role}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / GIB:.2g} GiB"
