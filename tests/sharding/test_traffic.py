"""Collectives read from programs whose traffic is known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.traffic import Traffic, collectives


def compiled(fn, *shapes, **jit):
    return jax.jit(fn, **jit).lower(*shapes).compile().as_text() or ""


def test_gather_in_loop_counts_iterations():
    mesh = make_mesh(fsdp=8)
    whole = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    weights = jax.ShapeDtypeStruct((5, 64, 48), jnp.float32, sharding=cut)
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=whole)

    def forward(weights, x):
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w, whole)
            return jnp.tanh(w @ jnp.tanh(x @ w)), None

        return jax.lax.scan(layer, x, weights)[0]

    found = collectives(compiled(forward, weights, x, out_shardings=whole))
    size = 5 * 64 * 48 * 4
    assert found["all-gather"] == Traffic(5, size, size * 7 / 8)


def test_loop_length_can_be_given():
    mesh = make_mesh(fsdp=8)
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=rows)
    times = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))

    def add(x, times):
        return jax.lax.fori_loop(
            0, times, lambda _, s: s + jnp.sum(jnp.sin(x + s), axis=0, keepdims=True), x[:1] * 0
        )

    found = collectives(compiled(add, x, times), trips=[3])
    assert found["all-reduce"].count >= 3
    assert found["all-reduce"].size >= 3 * 32 * 4


TPU = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p: bf16[8,128]) -> bf16[1,128] {
  %all-reduce.9 = bf16[8,128]{1,0:T(8,128)(2,1)} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
}

%wide.cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %limit = s32[]{:T(128)} constant(36)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%wide.body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %same = f32[8] get-tuple-element(%p), index=1
  %pair = (bf16[4,128]{1,0:T(8,128)(2,1)}, f32[8]{0:T(128)}) all-reduce(%x, %y), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, to_apply=%add
  %fusion = bf16[1,128]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = (s32[], f32[8]) tuple(%next, %same)
}

%less (a: u32[]) -> pred[] {
  %a = u32[]{:T(128)} parameter(0)
  %end = u32[]{:T(128)} constant(8)
  ROOT %lt = pred[]{:T(512)} compare(%a, %end), direction=LT
}

%windowed.cond (p: (f32[8], u32[])) -> pred[] {
  %p = (f32[8], u32[]) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %fused = pred[]{:T(512)} fusion(%i), kind=kLoop, calls=%less
}

%windowed.body (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  %p = (f32[8], u32[]) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %one = u32[]{:T(128)} constant(1)
  %middle = u32[]{:T(128)} add(%i, %one)
  %next = u32[]{:T(128)} add(%middle, %one)
  %x = f32[8] get-tuple-element(%p), index=0
  %y = f32[8] collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %out = (f32[8], u32[]) tuple(%y, %next)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %ag = (f32[2,8]{1,0}, f32[16,8]{1,0:T(8,128)}) all-gather-start(%p), replica_groups=[4,8]<=[32], dimensions={0}
  %done = f32[16,8]{1,0} all-gather-done(%ag)
  %zero = s32[]{:T(128)} constant(0)
  %t = (s32[], f32[8]) tuple(%zero, %p)
  %first = u32[]{:T(128)} constant(2)
  %w = (f32[8], u32[]) tuple(%p, %first)
  %window = (f32[8], u32[]) while(%w), condition=%windowed.cond, body=%windowed.body
  %loop = (s32[], f32[8]) while(%t), condition=%wide.cond, body=%wide.body
  ROOT %move = f32[8]{0} collective-permute(%q), source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501


def test_tpu_program_forms_are_read():
    found = collectives(TPU)
    pair = 4 * 128 * 2 + 8 * 4
    assert found == {
        "all-gather": Traffic(1, 16 * 8 * 4, 16 * 8 * 4 * 7 / 8),
        "all-reduce": Traffic(36, 36 * pair, 36 * pair * 2 * 3 / 4),
        "reduce-scatter": Traffic(36, 36 * 2048, 36 * 2048 * 3 / 4),
        "collective-permute": Traffic(4, 4 * 32, 4 * 32),  # the window goes from 2 to 8 by 2
    }


def test_a_loop_that_counts_in_another_way_is_an_error():
    down = TPU.replace("direction=LT", "direction=GT")
    with pytest.raises(ValueError, match=r"the loop (window|loop) .* counts in an unknown way"):
        collectives(down)


def test_a_loop_that_ends_by_its_data_needs_a_length():
    data = TPU.replace("compare(%i, %limit), direction=LT", "custom-call(%p)")
    assert collectives(data, trips=[5])["reduce-scatter"].count == 5
    with pytest.raises(ValueError, match=r"the loop loop .* ends by its data"):
        collectives(data)


def test_a_program_of_one_device_sends_nothing():
    program = "ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}"
    assert collectives(program) == {}
