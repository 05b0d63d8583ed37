"""The real step compiled for 8 simulated devices, against numbers known from the model."""

import dataclasses
import json
import math

import jax
import pytest

from jaxrl import cli
from jaxrl.builders.layout import make_layout
from jaxrl.commands.plan import text as plan
from jaxrl.commands.plan.chips import CHIPS
from jaxrl.commands.plan.decoding import needed_memory, read_weights
from jaxrl.commands.plan.program import compile_step
from jaxrl.commands.plan.resident import on_one, resident_memory
from jaxrl.commands.plan.roofline import forward_flops, roofline
from jaxrl.commands.plan.step import make_step
from jaxrl.commands.plan.topology import Topology, open_topology
from jaxrl.core.precision import parse
from jaxrl.huggingface.config import convert
from jaxrl.models import spec
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import parameter_count
from jaxrl.sharding.memory import MemoryTraffic
from tests import tiny
from tests.commands.plan.configs import make_config


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("model"))
    topology = open_topology("cpu:8")
    return config, topology, compile_step(config, topology)


def test_step_compiles_without_weights(planned):
    _, _, program = planned
    assert (program.rows, program.microbatches, program.row_length) == (8, 4, 32)
    count = parameter_count(program.step.model.specs)
    assert count == sum(x.size for x in jax.tree.leaves(tiny.params()))
    # Matrices are sharded over all 8 devices, norms are whole; Adam keeps two moments.
    norms = sum(
        math.prod(one.shape)
        for one in spec.flatten(program.step.model.specs).values()
        if "norm" in one.axes
    )
    held = 4 * ((count - norms) / 8 + norms)
    memory = program.memory
    assert memory.params == held
    assert memory.optimizer == pytest.approx(2 * held, abs=64)
    assert memory.gradients == held
    assert memory.copies == held / 2
    parts = [getattr(memory, name) for name in ("params", "optimizer", "gradients", "copies")]
    assert memory.peak == pytest.approx(sum(parts) + memory.activations + memory.rest)
    assert program.traffic["all-reduce"].count >= program.microbatches * 2


def test_plan_ends_with_the_verdict(planned):
    config, topology, program = planned
    text = plan.plan_text(config, topology, program, link_rate=1e9)
    assert text.splitlines()[-1].endswith("per chip: fits")
    said = ("parameters", "all-reduce", "model FLOPs", "Publishing", "mesh fsdp 4, tensor 2")
    for part in (*said, "sampler's weights", "KV cache, 32 rows x 64", "learning", "sampling"):
        assert part in text
    small = Topology(name="x", chip=CHIPS["v5e"], devices=topology.devices)
    assert "tokens/s" in plan.plan_text(config, small, program, link_rate=1e9)


def test_decoding_reads_weights_and_cache_once(planned):
    config, topology, program = planned
    found, cache = program.decoding, program.resident.cache
    # All weights but the experts that no token chooses, on each half of the axis `tensor`.
    assert found.weights == parameter_count(program.step.model.specs) * 2 / 2
    # Keys and values of 2 layers and one of 2 heads of size 8, for 8 of 32 rows, in bf16.
    assert found.cache == cache.size == 8 * 64 * 2 * 2 * 8 * 2
    chip = dataclasses.replace(CHIPS["v5e"], memory_rate=1e6)
    there = Topology(name="x", chip=chip, devices=topology.devices)
    text = plan.plan_text(config, there, program, link_rate=1e9)
    assert f"roofline: {32 / (found.needed / 1e6):,.0f} tokens/s at full bandwidth" in text
    moved = MemoryTraffic(2 * found.needed, found.needed)
    compiled = dataclasses.replace(found, temporary=1e6, moved=moved, sent=found.needed)
    text = plan.plan_text(
        config, there, dataclasses.replace(program, decoding=compiled), link_rate=1e9
    )
    assert "3.00 times what it must read" in text
    assert "rejected" not in text
    without = dataclasses.replace(compiled, moved=None)
    text = plan.plan_text(
        config, there, dataclasses.replace(program, decoding=without), link_rate=1e9
    )
    assert "rejected by the compiler: out of memory" in text


def test_decode_step_reads_chosen_experts():
    specs = param_specs(tiny.MOE)
    few, many = (read_weights(tiny.MOE, specs, rows=rows) for rows in (1, 1000))
    experts = tiny.MOE.experts
    matrices = 3 * tiny.MOE.num_layers * tiny.MOE.hidden_size * experts.intermediate_size
    assert many - few == (experts.count - experts.per_token) * matrices
    untied = dataclasses.replace(tiny.MOE, tied=not tiny.MOE.tied)
    both = (read_weights(c, param_specs(c), rows=1000) for c in (tiny.MOE, untied))
    assert len({*both}) == 1  # an embedding that is not the head is only looked up


@pytest.mark.parametrize(
    ("precision", "chip", "said"),
    [
        ("bf16_master", "h100", "exact: bf16 operands in one pass, 989 TFLOP/s\n"),
        ("fp32", "h100", "exact: f32 operands in one pass, 67 TFLOP/s; bf16 operands: 989\n"),
        ("fp32,products=tf32x3", "h100", "tf32x3: f32 operands in 3 passes of tf32, 165 TFLOP/s"),
        ("fp32", "v6e", "exact: f32 operands in 6 passes of bf16, 153 TFLOP/s; bf16 operands: 918"),
        (
            "fp16_master",
            "v5p",
            "exact: f16 operands in 3 passes of bf16, 153 TFLOP/s\n  each product of f16 is 3 of "
            "bf16 (2.5 to 3.0 times the cycles), and splash takes no f16; see jaxrl doctor MODEL ",
        ),
    ],
)
def test_plan_reports_the_cost_of_products(planned, precision, chip, said):
    config, topology, program = planned
    changed = program.step.config.model_copy(update={"precision": parse(precision)})
    other = dataclasses.replace(program, step=program.step._replace(config=changed))
    there = Topology(name=chip, chip=CHIPS[chip], devices=topology.devices)
    assert f"products = {said}" in plan.plan_text(config, there, other, link_rate=1e9)


def test_one_of_a_thing_is_singular(planned):
    config, topology, program = planned
    layout = make_layout(
        config.mesh.model_copy(update={"fsdp": 1, "tensor": 1}),
        devices=topology.devices[:1],
        precision=config.precision,
    )
    alone = dataclasses.replace(
        program, rows=1, microbatches=1, step=program.step._replace(layout=layout)
    )
    there = dataclasses.replace(topology, name="cpu:1", devices=topology.devices[:1])
    lines = plan.plan_text(config, there, alone, link_rate=1e9).splitlines()
    assert lines[0] == f"{config.model.path}: 17.6K parameters, bf16_master"
    assert lines[1] == "cpu:1: 1 chip"
    assert lines[2].startswith("step: at most 1 microbatch of 1 row of 32 tokens, remat ")


def test_chip_with_two_devices_is_named(planned):
    config, topology, program = planned
    there = Topology(name="tpu7x:2x2x1", chip=CHIPS["tpu7x"], devices=topology.devices)
    line = plan.plan_text(config, there, program, link_rate=1e9).splitlines()[1]
    assert line == (
        "tpu7x:2x2x1: 8 devices on 4 chips ('per chip' below is per device), mesh fsdp 4, tensor 2"
    )


def test_plan_tells_compiled_from_estimated(planned):
    config, topology, program = planned
    lines = plan.plan_text(config, topology, program, link_rate=1e9).splitlines()
    (line,) = [line for line in lines if line.startswith("compiled in")]
    assert line.endswith(
        "memory and collectives of the step; estimated: memory outside it, and times"
    )


@pytest.mark.parametrize(
    ("trunk", "said"), [("own", "a separate network"), ("shared", "on the policy's trunk")]
)
def test_critic_step_is_reported_as_not_counted(planned, tmp_path, trunk, said):
    config = make_config(tmp_path, loss__name="ppo", critic__trunk=trunk)
    text = plan.plan_text(config, planned[1], planned[2], link_rate=1e9)
    assert "Not counted: " in text
    assert said in text
    assert text.splitlines()[-1].endswith("per chip: fits, not counting the critic's step")


def test_plan_draws_which_devices_hold_which_models(planned, tmp_path):
    topology = planned[1]
    changes = {"loss__name": "ppo", "reward__kl": "0.1", "mesh__fsdp": 2, "mesh__tensor": 1}
    own = {"critic_mesh__data": 1, "critic_mesh__tensor": 2, "reference_mesh__data": 1}
    config = make_config(tmp_path, **changes, **own, sampler__devices=3)
    step = make_step(config, topology)
    program = dataclasses.replace(planned[2], step=step, resident=resident_memory(step))
    lines = plan.plan_text(config, topology, program, link_rate=1e9).splitlines()
    first = lines.index("Devices, and what each holds, at least") + 1
    drawn = [line.rpartition(", ")[0].split() for line in lines[first : first + 3]]
    assert drawn == [
        ["0", "to", "1", "policy", "mesh", "fsdp", "2"],
        ["2", "to", "3", "critic", "mesh", "tensor", "2"],
        ["4", "reference", "mesh", "of", "one", "device"],
    ]
    assert lines[first + 3].split() == ["5", "to", "7", "sampler", "not", "counted"]
    large = dataclasses.replace(
        program.resident, apart=program.resident.apart | {"critic_mesh": 1e15}
    )
    program = dataclasses.replace(program, resident=large)
    assert "does not fit" in plan.plan_text(config, topology, program, link_rate=1e9)


def test_score_pass_needs_less_than_the_step(planned):
    config, topology, program = planned
    step = make_step(config, topology)
    score = jax.jit(step.learner.score).lower(step.state.params, step.minibatch).compile()
    found, memory = score.memory_analysis(), program.memory
    needed = found.temp_size_in_bytes + found.output_size_in_bytes
    assert needed < memory.peak - memory.params - memory.optimizer


def test_verdict_covers_all_phases(planned, capsys, monkeypatch):
    config, topology, program = planned
    step, memory = program.memory.peak, topology.chip.memory
    cache = dataclasses.replace(program.resident.cache, size=memory)
    large = dataclasses.replace(
        program, resident=dataclasses.replace(program.resident, cache=cache)
    )
    assert step < memory < plan.peak(large)
    text = plan.plan_text(config, topology, large, link_rate=1e9)
    assert text.splitlines()[-1].endswith("per chip: does not fit")
    assert "sampling.max_batch = 32 instead of 64: half the cache" in text
    assert "train.microbatch_tokens" not in text
    command = ["plan", "--model.path", config.model.path, "--topology", "cpu:8"]
    for found, status in ((program, 0), (large, 5)):
        monkeypatch.setattr(
            "jaxrl.commands.plan.program.compile_step", lambda *_, found=found: found
        )
        assert cli.main(command) == status
        assert capsys.readouterr().out.splitlines()[-1] == plan.verdict(found, topology)


def test_step_that_does_not_fit_gets_advice(planned):
    config, _, program = planned
    chip = dataclasses.replace(CHIPS["v5e"], memory=1000.0)
    tight = Topology(name="x", chip=chip, devices=[])
    text = plan.plan_text(config, tight, program, link_rate=1e9)
    assert text.splitlines()[-1].endswith("per chip: does not fit")
    assert "train.remat = 'layer' instead of 'matmuls'" in text
    assert "train.microbatch_tokens = 32 instead of 64" in text
    assert text.index("microbatch_tokens = 32") < text.index(
        "optimizer.offload"
    )  # the larger saving first


def test_rejected_step_has_its_figures(planned, monkeypatch):
    config, topology, program = planned

    def reject(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 3.5G of 1.75G hbm."
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", reject)
    rejected = compile_step(config, topology)
    found, made = rejected.memory, program.memory
    for part in ("params", "optimizer", "gradients", "copies", "host"):
        assert getattr(found, part) == getattr(made, part)
    assert found.activations > 0.9 * found.peak == 0.9 * 3.5 * 2**30
    chip = dataclasses.replace(CHIPS["v5e"], memory=1.75 * 2**30)
    text = plan.plan_text(
        config, Topology(name="x", chip=chip, devices=[]), rejected, link_rate=1e9
    )
    assert "rejected by the compiler" in text
    assert "Memory of the step" in text
    assert "products at this rate" in text
    assert text.splitlines()[-1] == "peak 3.5 GiB of 1.8 GiB per chip: does not fit"


def test_missing_cudnn_error_names_the_package(planned, monkeypatch):
    def reject(*_, **__):
        raise jax.errors.JaxRuntimeError("NOT_FOUND: cuDNN not found.")

    monkeypatch.setattr(jax.stages.Lowered, "compile", reject)
    with pytest.raises(ModuleNotFoundError, match="pip install nvidia-cudnn-cu12"):
        compile_step(planned[0], planned[1])


def test_out_of_memory_error_is_parsed():
    first = "RESOURCE_EXHAUSTED: ... HLO temporaries (298.12G) exceeds available HBM (95.74G)."
    second = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2.5T of 15.75G hbm."
    assert needed_memory(first) == 298.12 * 2**30
    assert needed_memory(second) == 2.5 * 2**40
    assert needed_memory("INTERNAL: (298.12G) exceeds available HBM (95.74G)") is None


def test_flops_by_hand(planned):
    _, _, program = planned
    # Layer: q 32x32, k and v 16x32, o 32x32, three of 48x32; two layers; tied head 64x32.
    weights = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32) + 64 * 32
    attention = 2 * 2 * 4 * 8 * 10 * 10  # layers, heads, head_dim; half of two products of 10 x 10
    found = forward_flops(tiny.CONFIG, program.step.model.specs, rows=3, length=10)
    assert found == 3 * (2 * 10 * weights + attention)


def test_token_flops_count_router_and_chosen_experts():
    experts = tiny.MOE.experts
    every = dataclasses.replace(experts, per_token=experts.count)
    specs = param_specs(tiny.MOE)
    some, all_of_them = (
        forward_flops(dataclasses.replace(tiny.MOE, experts=e), specs, rows=1, length=10)
        for e in (experts, every)
    )
    left_out = experts.count - experts.per_token
    matrix = tiny.MOE.hidden_size * experts.intermediate_size
    assert all_of_them - some == 2 * 10 * tiny.MOE.num_layers * left_out * 3 * matrix


def test_program_size_is_independent_of_the_layers(planned, tmp_path, monkeypatch):
    lengths = []

    class StopError(Exception):
        pass

    for layers in (2, 48):
        content = convert.to_hf_config(tiny.CONFIG, dtype="float32") | {
            "num_hidden_layers": layers,
            "layer_types": None,
        }
        config = make_config(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(content))

        def keep(self):
            lengths.append(len(self.as_text().splitlines()))
            raise StopError

        monkeypatch.setattr(jax.stages.Lowered, "compile", keep)
        with pytest.raises(StopError):
            compile_step(config, planned[1])
    assert lengths[0] == lengths[1]


def test_command(tmp_path, capsys):
    make_config(tmp_path)
    keys = ["--model.path", str(tmp_path)]  # no data and no reward
    assert cli.main(["plan", *keys, "--estimate"]) == 0
    assert "GRPO 1 trained, 1 frozen" in capsys.readouterr().out
    assert cli.main(["plan", *keys, "--topology", "cpu:8"]) == 1
    assert "needs 1 device and there are 8" in capsys.readouterr().err


def test_only_adapters_have_gradients_and_moments(planned, tmp_path):
    config = make_config(
        tmp_path, lora__rank="8", lora__targets='["q_proj"]', precision="bf16_master"
    )
    _, topology, whole = planned
    program = compile_step(config, topology)
    adapters = 2 * 8 * (32 + 32)  # layers, rank, in and out
    assert parameter_count(program.step.specs.adapters) == adapters
    memory = program.memory
    # A is sharded over fsdp = 4 only, B over tensor = 2 only.
    held = 4 * (2 * 8 * 32 / 4 + 2 * 32 * 8 / 2)
    assert memory.gradients == held
    assert memory.optimizer == pytest.approx(2 * held, abs=64)
    assert memory.params == whole.memory.params / 2 + held
    assert memory.copies == held / 2
    text = plan.plan_text(config, topology, program, link_rate=1e9)
    assert "adapters of rank 8: 1,024 trained parameters" in text
    chip = CHIPS["v5e"]
    two, three = (roofline(p, chip, remat="matmuls").model_flops for p in (program, whole))
    assert 2 / 3 < two / three < 0.85


def test_a_critics_arrays_are_counted(planned, tmp_path):
    _, topology, without = planned
    program = compile_step(make_config(tmp_path, loss__name="ppo"), topology)
    batch = program.step.minibatch.batch
    assert without.step.minibatch.batch.values is None
    targets = on_one((batch.values, batch.returns))
    assert targets == 2 * 4 * 32 * 32 / 4  # f32 for 32 rows of 32 tokens, over the axis fsdp
    assert on_one(batch) - on_one(without.step.minibatch.batch) == targets
    # All arrays lie on the devices, although the policy's step reads neither of the two.
    assert program.memory.rest - without.memory.rest >= targets
    assert program.memory.rest > on_one(batch)
