"""What `jaxrl plan` prints."""

from collections.abc import Iterator

from jaxrl import parts
from jaxrl.config.training import Config
from jaxrl.models import lora
from jaxrl.planning.program import Program
from jaxrl.planning.roofline import Roofline, parameter_count, roofline
from jaxrl.planning.topology import GIB, Topology


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
        *_time(program, found),
        *_traffic(program),
        *_publishing(program, link_rate=link_rate),
    ]
    if not fits(program, topology):
        lines += ["", "To make it fit:", *(f"  - {line}" for line in _advice(config, program))]
    left_out = _left_out(config)
    if left_out:
        lines += ["", left_out]
    last = verdict(program, topology) + ", without the critic" * bool(left_out)
    return "\n".join([*lines, "", last])


def peak(program: Program) -> float:
    """Bytes that a chip needs at once."""
    return program.memory.peak if program.memory else program.over or float("inf")


def fits(program: Program, topology: Topology) -> bool:
    """Whether the compiled step has room on every chip."""
    return program.memory is not None and peak(program) <= topology.chip.memory


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
    yield f"compiled in {program.seconds:.0f} s, {program.hlo_bytes / 2**20:.1f} MiB of program"


def _left_out(config: Config) -> str:
    """What the plan does not count of a run with a critic; empty without one."""
    if parts.make_recipe(config).critic is None:
        return ""
    if config.critic.trunk == "shared":
        return (
            "Left out: the critic, whose head on the policy's trunk is one more row of parameters"
        )
    return (
        "Left out: the critic, a network of its own that is trained whole. Between steps a chip "
        "holds its parameters and optimizer, too; its step takes turns with the policy's"
    )


def _memory(program: Program) -> Iterator[str]:
    if program.memory is None:
        return
    yield "\nMemory per chip"
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


def _time(program: Program, found: Roofline) -> Iterator[str]:
    yield "\nTime of a step"
    yield f"  {'model FLOPs':32}{found.model_flops:12.3g}"
    yield f"  {'FLOPs with recomputation':32}{found.run_flops:12.3g}"
    for name, seconds in (
        ("products at the chips' peak", found.compute),
        ("memory at its full rate", found.memory),
        ("links at their full rate", found.links),
    ):
        if seconds is not None and program.memory is not None:
            yield f"  {name:32}{seconds:10.3f} s"
    low, high = found.overlapped, found.in_turn
    if low is not None and high is not None and program.memory is not None:
        tokens = program.rows * program.microbatches * program.row_length
        share = found.model_flops / found.run_flops * (found.compute or 0) / high
        yield (
            f"  roofline: {low:.3f} to {high:.3f} s, {tokens / high:,.0f} tokens/s and "
            f"{share:.0%} of peak if nothing overlaps".replace("%", " %")
        )


def _traffic(program: Program) -> Iterator[str]:
    if program.memory is None:
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


def _advice(config: Config, program: Program) -> Iterator[str]:
    train, memory = config.train, program.memory
    if train.remat != "layer":
        yield f"train.remat = 'layer' instead of {train.remat!r}: keeps one array for each layer"
    if train.microbatch_tokens >= 2 * config.row_length:
        yield (
            f"train.microbatch_tokens = {config.row_length} instead of {train.microbatch_tokens}: "
            "one row at a time on each shard"
        )
    if config.mesh.data > 1:
        yield f"move mesh.data = {config.mesh.data} to mesh.fsdp, which cuts weights and moments"
    if config.row_length >= 8192 and config.mesh.context == 1:
        yield f"mesh.context = 2 or more: cuts the {config.row_length} tokens of a row"
    if not config.optimizer.offload:
        yield "optimizer.offload = true: moments in the host's memory between two steps"
    if memory is None or memory.optimizer > memory.activations:
        for role in ("moments", "grads"):
            if getattr(program.policy, role).itemsize > 2:
                yield f"precision = '{config.precision},{role}=bf16': half of the {role}"
    yield "more chips, and mesh.fsdp or mesh.tensor larger by as much"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / GIB:.2g} GiB"
