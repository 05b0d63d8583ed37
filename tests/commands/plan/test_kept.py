"""The advice to keep the outputs of products, where a chip has the memory for them."""

import dataclasses

from jaxrl.commands.plan import text as plan
from jaxrl.commands.plan.chips import CHIPS
from jaxrl.commands.plan.kept import kept_outputs
from jaxrl.commands.plan.program import Memory, Program
from jaxrl.commands.plan.resident import resident_memory
from jaxrl.commands.plan.step import make_step
from jaxrl.commands.plan.topology import Topology, open_topology
from tests.commands.plan.configs import make_config


def test_advice_depends_on_remat_and_on_what_is_free(tmp_path):
    topology = open_topology("cpu:8")
    config = make_config(tmp_path, train__remat="layer")
    step = make_step(config, topology)
    rows, length = step.config.microbatch_rows, step.config.row_length
    # A token of a layer keeps q 32, k and v 16, o 32, gate and up 48, down 32 and attention's 32;
    # of these `tensor` 2 cuts all but o and down. 2 layers, rows over `fsdp` 4, bf16.
    kept = 2 * (32 + 32 + (32 + 16 + 16 + 48 + 48 + 32) / 2) * (rows * length / 4) * 2
    assert kept_outputs(step) == kept
    memory = Memory(
        params=0, optimizer=0, host=0, gradients=0, copies=0, activations=0, rest=0, peak=1e6
    )
    program = Program(
        step=step,
        rows=rows,
        microbatches=step.microbatches,
        row_length=length,
        resident=resident_memory(step),
        memory=memory,
        seconds=1.0,
    )
    learning = plan.phases(program)["learning"]
    whole = config.model_copy(update={"train": config.train.model_copy(update={"remat": "none"})})
    for given, free, said in ((config, 1.3, True), (config, 1.2, False), (whole, 1.3, False)):
        chip = dataclasses.replace(CHIPS["v5e"], memory=learning + free * kept)
        there = Topology(name="x", chip=chip, devices=topology.devices)
        text = plan.plan_text(given, there, program, link_rate=1e9)
        assert ("train.remat = 'matmuls' instead of 'layer'" in text) == said
