"""Output of `jaxrl plan`."""

import math
from collections.abc import Iterator, Mapping

from jaxrl.builders.model import tpu_cost
from jaxrl.builders.recipe import make_recipe
from jaxrl.commands.plan.chips import TPUS
from jaxrl.commands.plan.kept import kept_outputs
from jaxrl.commands.plan.program import Program
from jaxrl.commands.plan.roofline import Roofline, roofline
from jaxrl.commands.plan.topology import Topology
from jaxrl.commands.plan.units import count_of, parameter_text, percent_text, size_text, time_text
from jaxrl.config.training import Config
from jaxrl.models import lora, parameter_count


def plan_text(config: Config, topology: Topology, program: Program, *, link_rate: float) -> str:
    """Formats the plan; the last line is the verdict. `link_rate` is in bytes per second from the
    learner to the samplers."""
    found = roofline(program, topology.chip, remat=config.train.remat)
    lines = [
        *_header(config, topology, program),
        *_placement(topology, program),
        *_memory(program),
        *_resident(program),
        *_time(topology, program, found),
        *_decoding(topology, program),
        *_traffic(program),
        *_publishing(program, link_rate=link_rate),
    ]
    if not fits(program, topology):
        advice = _advice(config, program, memory=topology.chip.memory)
        lines += ["", "To make it fit:", *(f"  - {line}" for line in advice)]
    elif (saving := _remat_that_fits(config, program, memory=topology.chip.memory)) is not None:
        lines += ["", saving]
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
    return max([*phases(program).values(), *program.resident.apart.values()])


def fits(program: Program, topology: Topology) -> bool:
    """Tells if every phase of the run fits on a chip."""
    return not program.rejected and peak(program) <= topology.chip.memory


def verdict(program: Program, topology: Topology) -> str:
    """Formats e.g. "peak 31.4 GiB of 95.7 GiB per chip: fits"."""
    word = "fits" if fits(program, topology) else "does not fit"
    return f"peak {size_text(peak(program))} of {size_text(topology.chip.memory)} per chip: {word}"


def _header(config: Config, topology: Topology, program: Program) -> Iterator[str]:
    count = parameter_count(program.step.model.specs)
    yield f"{config.model.path}: {parameter_text(count)} parameters, {config.precision.text}"
    if isinstance(program.step.specs, lora.Adapted):
        trained = parameter_count(program.step.specs.adapters)
        yield f"adapters of rank {config.lora.rank}: {parameter_text(trained)} trained parameters"
    yield f"{topology.name}: {_devices(topology, program)}"
    yield (
        f"step: at most {count_of(program.microbatches, 'microbatch', 'microbatches')} of "
        f"{count_of(program.rows, 'row')} of {count_of(program.row_length, 'token')}, "
        f"remat {config.train.remat}, attention by {program.step.kernel}"
    )
    if program.rejected:
        yield (
            f"rejected by the compiler after {program.seconds:.0f} s: out of memory; below, the "
            "step's total is the compiler's and all else is estimated"
        )
    else:
        yield (
            f"compiled in {program.seconds:.0f} s, {size_text(program.hlo_bytes)} of program: "
            "memory and collectives of the step; estimated: memory outside it, and times"
        )


def _devices(topology: Topology, program: Program) -> str:
    """Formats e.g. "8 chips, mesh fsdp 4, tensor 2", and "1 chip" without a mesh."""
    number, each = len(topology.devices), topology.chip.devices
    text = count_of(number, "chip")
    if each > 1:
        chips = count_of(number // each, "chip")
        text = f"{number} devices on {chips} ('per chip' below is per device)"
    return f"{text}, {_sizes_of(program.step.layout.mesh.shape)}" if number > 1 else text


def _placement(topology: Topology, program: Program) -> Iterator[str]:
    """Draws which devices hold which models, if some have devices of their own."""
    step, first = program.step, 0
    if not step.apart and not step.config.sampler.devices:
        return
    held = program.resident
    beside = {"critic": held.critic, "reference": held.reference, "reward": held.reward_model}
    policy = ["policy", *(name for name, size in beside.items() if size)]
    if held.sampler:
        policy.append("sampler")
    seats = [(", ".join(policy), step.layout.mesh.shape, phases(program)["learning"])]
    seats += [
        (name.removesuffix("_mesh"), layout.mesh.shape, held.apart[name])
        for name, layout in step.apart.items()
    ]
    yield "\nDevices, and what each holds, at least"
    for name, shape, size in seats:
        count = math.prod(shape.values())
        yield _seat(name, first=first, count=count, text=f"{_sizes_of(shape)}, {size_text(size)}")
        first += count
    if count := step.config.sampler.devices:
        yield _seat("sampler", first=len(topology.devices) - count, count=count, text="not counted")


def _seat(name: str, *, first: int, count: int, text: str) -> str:
    numbers = f"{first}" if count == 1 else f"{first} to {first + count - 1}"
    return f"  {numbers:10}{name:34}{text}"


def _sizes_of(shape: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{axis} {n}" for axis, n in shape.items() if n > 1)
    return f"mesh {sizes or 'of one device'}"


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
    sizes = {
        "parameters": memory.params,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "weights in compute dtype": memory.copies,
        "activations, other temporaries": memory.activations,
        "batch, metrics, program": memory.rest,
    }
    if memory.host:
        sizes["optimizer in host memory"] = memory.host
    yield from _sizes(sizes)


def _resident(program: Program) -> Iterator[str]:
    found = program.resident
    if found.always:
        yield "\nHeld outside the step, per chip"
        held = {
            "sampler's weights": found.sampler,
            "the engine's KV cache": found.engine_cache,
            "reference": found.reference,
            "reward model or teacher": found.reward_model,
            "critic and its optimizer": found.critic,
        }
        yield from _sizes({name: size for name, size in held.items() if size})
    if (cache := found.cache) is not None:
        yield "\nWhile sampling, per chip"
        sizes = {
            f"KV cache, {count_of(cache.rows, 'row')} x {cache.slots:,}": cache.size,
            "other caches at the same time": cache.moving,
        }
        if cache.decoding:
            sizes["or temporaries of decoding"] = cache.decoding
        yield from _sizes(sizes)
    yield "\nPeak per chip while"
    yield from _sizes(phases(program))


def _sizes(sizes: Mapping[str, float]) -> Iterator[str]:
    return (_row(name, size_text(size)) for name, size in sizes.items())


def _row(name: str, text: str) -> str:
    return f"  {name:32}{text:>12}"


def _time(topology: Topology, program: Program, found: Roofline) -> Iterator[str]:
    yield "\nTime of the step"
    if found.products is not None:
        others = ""
        if found.products.operands == "f32":
            others = f"; bf16 operands: {topology.chip.units['bf16'] / 1e12:,.0f}"
        yield (
            f"  products = {program.step.config.precision.products}: {found.products}, "
            f"{found.products.rate / 1e12:,.0f} TFLOP/s{others}"
        )
        cost = tpu_cost(program.step.config.precision)
        if cost and topology.name.partition(":")[0] in TPUS:
            yield f"  {cost}"
    yield _row("model FLOPs", f"{found.model_flops:.3g}")
    yield _row("FLOPs with recomputation", f"{found.run_flops:.3g}")
    for name, seconds in (
        ("products at this rate", found.compute),
        ("memory at full bandwidth", found.memory),
        ("links at full bandwidth", found.links),
        ("sum over instructions", found.instructions),
        ("the compiler's estimate", found.estimated),
    ):
        if seconds is not None:
            yield _row(name, time_text(seconds))
    if program.work:
        moved = (sum(one.read for one in program.work), sum(one.written for one in program.work))
        read, written = (size_text(size) for size in moved)
        yield f"  compiled: reads {read} and writes {written}"
    low, high = found.overlapped, found.in_turn
    if low is not None and high is not None:
        tokens = program.rows * program.microbatches * program.row_length
        share = found.model_flops / found.run_flops * (found.compute or 0) / high
        yield (
            f"  roofline: {time_text(low)} to {time_text(high)}, {tokens / high:,.0f} tokens/s and "
            f"{percent_text(share)} of peak without overlap"
        )


def _decoding(topology: Topology, program: Program) -> Iterator[str]:
    found, rate = program.decoding, topology.chip.memory_rate
    if found is None or rate is None:
        return
    yield f"\nDecoding a token in each of {count_of(found.rows, 'row')}, per chip"
    cache = f"KV cache to read, {found.slots:,} slots"
    yield from _sizes({"weights to read": found.weights, cache: found.cache})
    seconds = found.needed / rate
    yield _row("memory at full bandwidth", time_text(seconds))
    if found.sent and topology.chip.link_rate is not None:
        links = found.sent / topology.chip.link_rate
        yield _row("links at full bandwidth", f"{time_text(links)}, {size_text(found.sent)} sent")
        seconds = max(seconds, links)
    yield f"  roofline: {found.rows / seconds:,.0f} tokens/s at full bandwidth"
    if found.moved is not None:
        read, written = (size_text(size) for size in found.moved)
        ratio = sum(found.moved) / found.needed
        yield f"  compiled: reads {read} and writes {written}, {ratio:.2f} times what it must read"
    elif found.temporary is not None:
        yield "  rejected by the compiler: out of memory"


def _traffic(program: Program) -> Iterator[str]:
    if program.rejected:
        return
    yield "\nCollectives of the step, per chip"
    for kind, traffic in program.traffic.items():
        size, sent = size_text(traffic.size), size_text(traffic.sent)
        yield f"  {kind:20}{count_of(traffic.count, 'time'):>13}{size:>14}{sent:>14} sent"
    if not program.traffic:
        yield "  none"


def _publishing(program: Program, *, link_rate: float) -> Iterator[str]:
    size = parameter_count(program.step.model.specs) * program.step.config.precision.wire.itemsize
    yield "\nPublishing"
    yield f"  {size_text(size)}, {time_text(size / link_rate)} at {link_rate / 1e9:g} GB/s"


def _advice(config: Config, program: Program, *, memory: float) -> Iterator[str]:
    found = phases(program)
    if found.pop("learning") > memory:
        # What makes the step smaller, the largest affected memory first.
        for size, text in sorted(_savings(config, program), key=lambda saving: -saving[0]):
            yield f"{text} (of {size_text(size)})"
    if max(found.values(), default=0.0) > memory:
        yield from _advice_for_the_sampler(config, program)
    yield "use more chips, with mesh.fsdp or mesh.tensor larger by the same factor"


def _advice_for_the_sampler(config: Config, program: Program) -> Iterator[str]:
    cache, most = program.resident.cache, config.sampling.max_batch
    if cache is not None and cache.rows > program.step.layout.count("batch"):
        yield f"sampling.max_batch = {max(1, most // 2)} instead of {most}: half the cache"
    if program.resident.engine_cache:
        yield "sampler.kv_cache_bytes smaller: fewer completions at once, the others wait"
    if config.sampler.tensor is not None:
        yield (
            f"sampler.tensor larger than {config.sampler.tensor}, or left out: smaller shards of "
            "the sampler's weights"
        )
    if cache is not None or program.resident.engine_cache:
        yield "sampler.name = 'vllm', with servers on other chips"


def _remat_that_fits(config: Config, program: Program, *, memory: float) -> str | None:
    """Advises to keep the outputs of products if the chip seems to have the memory for them."""
    free, more = memory - phases(program)["learning"], kept_outputs(program.step)
    if config.train.remat not in ("layer", "attention") or 1.25 * more > free:
        return None
    return (
        f"Faster if it fits: train.remat = 'matmuls' instead of {config.train.remat!r} repeats "
        f"fewer products, and keeps about {size_text(more)} more; {size_text(free)} are free"
    )


def _savings(config: Config, program: Program) -> Iterator[tuple[float, str]]:
    train, memory = config.train, program.memory
    if train.remat != "layer":
        text = f"train.remat = 'layer' instead of {train.remat!r}: keeps one array per layer"
        yield memory.activations, text
    if train.microbatch_tokens >= 2 * config.row_length:
        yield (
            memory.activations,
            f"train.microbatch_tokens = {config.row_length} instead of {train.microbatch_tokens}: "
            "a single row on each shard",
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
        if getattr(program.step.config.precision, role).itemsize > 2:
            yield size, f"precision = '{config.precision.text},{role}=bf16': half the {role}"
