"""Output of `jaxrl plan`."""

from collections.abc import Iterator

from jaxrl.builders.recipe import make_recipe
from jaxrl.commands.plan.chips import GIB
from jaxrl.commands.plan.program import Program
from jaxrl.commands.plan.roofline import Roofline, roofline
from jaxrl.commands.plan.topology import Topology
from jaxrl.config.training import Config
from jaxrl.models import lora
from jaxrl.models.spec import parameter_count


def plan_text(config: Config, topology: Topology, program: Program, *, link_rate: float) -> str:
    """Formats the plan; the last line is the verdict. `link_rate` is in bytes per second from the
    learner to the samplers."""
    found = roofline(program, topology.chip, remat=config.train.remat)
    lines = [
        *_header(config, topology, program),
        *_memory(program),
        *_resident(program),
        *_time(topology, program, found),
        *_traffic(program),
        *_publishing(program, link_rate=link_rate),
    ]
    if not fits(program, topology):
        advice = _advice(config, program, memory=topology.chip.memory)
        lines += ["", "To make it fit:", *(f"  - {line}" for line in advice)]
    not_counted = _not_counted(config)
    if not_counted:
        lines += ["", not_counted]
    last = verdict(program, topology) + ", not counting the critic's step" * bool(not_counted)
    return "\n".join([*lines, "", last])


def phases(program: Program) -> dict[str, float]:
    """Returns the peak bytes per chip in each phase of a run."""
    return program.resident.phases(program.memory.peak)


def peak(program: Program) -> float:
    """Returns the peak bytes per chip over all phases."""
    return max(phases(program).values())


def fits(program: Program, topology: Topology) -> bool:
    """Tells if every phase of the run fits on a chip."""
    return not program.rejected and peak(program) <= topology.chip.memory


def verdict(program: Program, topology: Topology) -> str:
    """Formats e.g. "peak 31.4 GiB of 95.7 GiB per chip: fits"."""
    word = "fits" if fits(program, topology) else "does not fit"
    return f"peak {_gib(peak(program))} of {_gib(topology.chip.memory)} per chip: {word}"


def _header(config: Config, topology: Topology, program: Program) -> Iterator[str]:
    sizes = ", ".join(f"{axis} {n}" for axis, n in program.step.layout.mesh.shape.items() if n > 1)
    count = parameter_count(program.step.model.specs)
    yield f"{config.model.path}: {count / 1e9:.2f} billion parameters, {config.precision}"
    if isinstance(program.step.specs, lora.Adapted):
        trained = parameter_count(program.step.specs.adapters)
        yield f"adapters of rank {config.lora.rank}: {trained:,} trained parameters"
    yield f"{topology.name}: {len(topology.devices)} chips, mesh {sizes or 'of one chip'}"
    yield (
        f"step: at most {program.microbatches} x {program.rows} rows of {program.row_length} "
        f"tokens, remat {config.train.remat}, attention by {program.step.kernel}"
    )
    if program.rejected:
        yield (
            f"rejected by the compiler after {program.seconds:.0f} s: out of memory; below, the "
            "step's total is the compiler's and all else is estimated"
        )
    else:
        yield (
            f"compiled in {program.seconds:.0f} s, {program.hlo_bytes / 2**20:.1f} MiB of program: "
            "memory and collectives of the step; estimated: memory outside it, and times"
        )


def _not_counted(config: Config) -> str:
    """Names the parts of a critic's step that the plan leaves out; empty without a critic."""
    if make_recipe(config).critic is None:
        return ""
    if config.critic.trunk == "shared":
        return "Not counted: the critic, whose head on the policy's trunk is one row of parameters"
    return (
        "Not counted: gradients and activations of the critic, a separate network; its step "
        "alternates with the policy's"
    )


def _memory(program: Program) -> Iterator[str]:
    yield "\nMemory of the step, per chip"
    memory = program.memory
    for name, size in (
        ("parameters", memory.params),
        ("optimizer", memory.optimizer),
        ("gradients", memory.gradients),
        ("weights in compute dtype", memory.copies),
        ("activations, other temporaries", memory.activations),
        ("batch, metrics, program", memory.rest),
    ):
        yield f"  {name:32}{_gib(size):>12}"
    if memory.host:
        yield f"  {'optimizer in host memory':32}{_gib(memory.host):>12}"


def _resident(program: Program) -> Iterator[str]:
    found = program.resident
    held = (
        ("sampler's weights", found.sampler),
        ("reference", found.reference),
        ("reward model or teacher", found.reward_model),
        ("critic and its optimizer", found.critic),
    )
    if found.always:
        yield "\nHeld outside the step, per chip"
        yield from (f"  {name:32}{_gib(size):>12}" for name, size in held if size)
    if found.cache is not None:
        yield "\nWhile sampling, per chip"
        cache = f"KV cache, {found.cache.rows} rows x {found.cache.slots}"
        yield f"  {cache:32}{_gib(found.cache.size):>12}"
        yield f"  {'extra while it grows':32}{_gib(found.cache.moving):>12}"
    yield "\nPeak per chip while"
    for phase, size in phases(program).items():
        yield f"  {phase:32}{_gib(size):>12}"


def _time(topology: Topology, program: Program, found: Roofline) -> Iterator[str]:
    yield "\nTime of the step"
    if found.products is not None:
        others = ""
        if found.products.operands == "f32":
            others = f"; bf16 operands: {topology.chip.units['bf16'] / 1e12:,.0f}"
        yield (
            f"  products = {program.step.policy.products}: {found.products}, "
            f"{found.products.rate / 1e12:,.0f} TFLOP/s{others}"
        )
    experts = program.step.model.config.experts
    if experts is not None and not topology.chip.grouped:
        yield f"  each token's products with {experts.per_token} experts are with all, and masked"
    yield f"  {'model FLOPs':32}{found.model_flops:12.3g}"
    yield f"  {'FLOPs with recomputation':32}{found.run_flops:12.3g}"
    for name, seconds in (
        ("products at this rate", found.compute),
        ("memory at full bandwidth", found.memory),
        ("links at full bandwidth", found.links),
    ):
        if seconds is not None:
            yield f"  {name:32}{seconds:10.3f} s"
    low, high = found.overlapped, found.in_turn
    if low is not None and high is not None:
        tokens = program.rows * program.microbatches * program.row_length
        share = found.model_flops / found.run_flops * (found.compute or 0) / high
        yield (
            f"  roofline: {low:.3f} to {high:.3f} s, {tokens / high:,.0f} tokens/s and "
            f"{share:.0%} of peak without overlap".replace("%", " %")
        )


def _traffic(program: Program) -> Iterator[str]:
    if program.rejected:
        return
    yield "\nCollectives of the step, per chip"
    for kind, traffic in program.traffic.items():
        size, sent = _gib(traffic.size), _gib(traffic.sent)
        yield f"  {kind:20}{traffic.count:7} times{size:>14}{sent:>14} sent"
    if not program.traffic:
        yield "  none"


def _publishing(program: Program, *, link_rate: float) -> Iterator[str]:
    size = parameter_count(program.step.model.specs) * program.step.policy.wire.itemsize
    yield "\nPublishing"
    yield f"  {_gib(size)}, {size / link_rate:.1f} s at {link_rate / 1e9:g} GB/s"


def _advice(config: Config, program: Program, *, memory: float) -> Iterator[str]:
    found = phases(program)
    if found.pop("learning") > memory:
        yield from _advice_for_the_step(config, program)
    if max(found.values(), default=0.0) > memory:
        yield from _advice_for_the_sampler(config, program)
    yield "use more chips, with mesh.fsdp or mesh.tensor larger by the same factor"


def _advice_for_the_sampler(config: Config, program: Program) -> Iterator[str]:
    cache, most = program.resident.cache, config.sampling.max_batch
    if cache is not None and cache.rows > program.step.layout.count("batch"):
        yield f"sampling.max_batch = {max(1, most // 2)} instead of {most}: half the cache"
    if config.sampler.rules is not None:
        rules = f"sampler.rules = {config.sampler.rules!r}"
        yield f"leave out {rules}: weights are sharded like the learner's"
    if cache is not None:
        yield "sampler.name = 'vllm', with servers on other chips"


def _advice_for_the_step(config: Config, program: Program) -> Iterator[str]:
    """Lists what makes the step smaller, largest affected memory first."""
    for size, text in sorted(_savings(config, program), key=lambda saving: -saving[0]):
        yield f"{text} (of {_gib(size)})"


def _savings(config: Config, program: Program) -> Iterator[tuple[float, str]]:
    train, memory = config.train, program.memory
    if train.remat != "layer":
        text = f"train.remat = 'layer' instead of {train.remat!r}: keeps one array per layer"
        yield memory.activations, text
    if train.microbatch_tokens >= 2 * config.row_length:
        yield (
            memory.activations,
            f"train.microbatch_tokens = {config.row_length} instead of {train.microbatch_tokens}: "
            "one row at a time on each shard",
        )
    if config.row_length >= 8192 and config.mesh.context == 1:
        text = f"mesh.context = 2 or more: shards the {config.row_length} tokens of a row"
        yield memory.activations, text
    if config.mesh.data > 1:
        state = memory.params + memory.optimizer + memory.gradients
        text = f"move mesh.data = {config.mesh.data} to mesh.fsdp, which shards weights and moments"
        yield state, text
    if not config.optimizer.offload:
        text = "optimizer.offload = true: moments in host memory between steps"
        yield memory.optimizer, text
    for role, size in (("moments", memory.optimizer), ("grads", memory.gradients)):
        if getattr(program.step.policy, role).itemsize > 2:
            yield size, f"precision = '{config.precision},{role}=bf16': half the {role}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / GIB:.2g} GiB"
