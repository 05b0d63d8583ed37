"""Collectives read from programs whose traffic is known."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.traffic import Traffic, collectives


def never(depth: int) -> int:
    raise AssertionError(f"a loop at depth {depth} has an unknown length")


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

    found = collectives(compiled(forward, weights, x, out_shardings=whole), trips=never)
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

    found = collectives(compiled(add, x, times), trips=lambda depth: 3 + depth)
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
  %limit = s32[]{:T(128)} constant(36)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%wide.body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %pair = (bf16[4,128]{1,0:T(8,128)(2,1)}, f32[8]{0:T(128)}) all-reduce(%x, %y), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, to_apply=%add
  %fusion = bf16[1,128]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %ag = (f32[2,8]{1,0}, f32[16,8]{1,0:T(8,128)}) all-gather-start(%p), replica_groups=[4,8]<=[32], dimensions={0}
  %done = f32[16,8]{1,0} all-gather-done(%ag)
  %loop = (s32[], f32[8]) while(%t), condition=%wide.cond, body=%wide.body
  ROOT %move = f32[8]{0} collective-permute(%q), source_target_pairs={{0,1},{1,0}}
}
"""  # noqa: E501


def test_tpu_program_forms_are_read():
    found = collectives(TPU, trips=never)
    pair = 4 * 128 * 2 + 8 * 4
    assert found == {
        "all-gather": Traffic(1, 16 * 8 * 4, 16 * 8 * 4 * 7 / 8),
        "all-reduce": Traffic(36, 36 * pair, 36 * pair * 2 * 3 / 4),
        "reduce-scatter": Traffic(36, 36 * 2048, 36 * 2048 * 3 / 4),
        "collective-permute": Traffic(1, 32, 32),
    }


def test_a_program_of_one_device_sends_nothing():
    program = "ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}"
    assert collectives(program, trips=never) == {}
