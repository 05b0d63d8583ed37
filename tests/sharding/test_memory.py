"""Memory traffic of programs whose bytes are known."""

import jax
import jax.numpy as jnp

from jaxrl.sharding.memory import MemoryTraffic, memory_traffic, program_work


def test_loop_reads_one_slice_per_iteration():
    weights = jax.ShapeDtypeStruct((5, 4096), jnp.float32)

    def total(weights):
        def layer(x, w):
            return jnp.tanh(x + w), None

        return jax.lax.scan(layer, jnp.zeros(4096), weights)[0]

    text = jax.jit(total).lower(weights).compile().as_text() or ""
    found, size = memory_traffic(text, trips=()), 4 * 4096
    # x and its part of the weights are read, x is written; the first x is copied or broadcast.
    assert 10 * size <= found.read <= 12 * size
    assert 5 * size <= found.written <= 7 * size


# As libtpu writes it: S(1) is the VMEM, and arrays that loops carry are changed in place.
TPU = """
%view (p: u16[5,8,128]) -> bf16[5,8,128] {
  %p = u16[5,8,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %tiled = u16[5,8,128]{2,1,0:T(8,128)(2,1)} copy(%p)
  ROOT %b = bf16[5,8,128]{2,1,0:T(8,128)(2,1)} bitcast-convert(%tiled)
}

%slice (q: u16[5,8,128], i: s32[]) -> f32[8,128] {
  %q = u16[5,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %seen = bf16[5,8,128]{2,1,0:T(8,128)(2,1)} fusion(%q), kind=kLoop, calls=%view
  %part = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%seen, %i), dynamic_slice_sizes={1,8,128}
  ROOT %wide = f32[8,128]{1,0:T(8,128)} convert(%part)
}

%write (r: u16[5,8,128], j: s32[], k: u16[128]) -> u16[5,8,128] {
  %r = u16[5,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %j = s32[]{:T(128)} parameter(1)
  %k = u16[128]{0:T(128)} parameter(2)
  ROOT %s = u16[5,8,128]{2,1,0:T(8,128)(2,1)} scatter(%r, %j, %k), to_apply=%any
}

%body (c: (s32[], u16[5,8,128], u16[128])) -> (s32[], u16[5,8,128], u16[128]) {
  %c = (s32[]{:T(128)}, u16[5,8,128]{2,1,0:T(8,128)(2,1)}, u16[128]{0:T(128)S(1)}) parameter(0)
  %n = s32[]{:T(128)S(6)} get-tuple-element(%c), index=0
  %cache = u16[5,8,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%c), index=1
  %new = u16[128]{0:T(128)S(1)} get-tuple-element(%c), index=2
  %set = u16[5,8,128]{2,1,0:T(8,128)(2,1)} fusion(%cache, %n, %new), kind=kCustom, calls=%write
  %read = f32[8,128]{1,0:T(8,128)S(1)} fusion(%set, %n), kind=kOutput, calls=%slice
  ROOT %t = (s32[], u16[5,8,128], u16[128]{0:T(128)S(1)}) tuple(%n, %set, %new)
}

%cond (d: (s32[], u16[5,8,128], u16[128])) -> pred[] {
  %d = (s32[], u16[5,8,128], u16[128]) parameter(0)
  ROOT %e = pred[]{:T(512)S(6)} constant(true)
}

ENTRY %main (a: u16[5,8,128], b: u16[128]) -> u16[5,8,128] {
  %a = u16[5,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = u16[128]{0:T(128)} parameter(1)
  %start = (u16[128]{0:T(128)S(1)}, u16[128]{0:T(128)}, u32[]{:S(2)}) copy-start(%b)
  %done = u16[128]{0:T(128)S(1)} copy-done(%start)
  %zero = s32[]{:T(128)S(6)} constant(0)
  %carry = (s32[], u16[5,8,128], u16[128]{0:T(128)S(1)}) tuple(%zero, %a, %done)
  %loop = (s32[], u16[5,8,128], u16[128]{0:T(128)S(1)}) while(%carry), condition=%cond, body=%body
  ROOT %out = u16[5,8,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def test_slices_updates_and_vmem():
    # 3 times: 8 x 128 numbers of 2 bytes are read and 128 written; before, 128 are read.
    found = memory_traffic(TPU, trips=[3])
    assert found == MemoryTraffic(2 * 128 + 3 * 2 * 8 * 128, 3 * 2 * 128)


# What a scan keeps of a product: a part of the stack, besides the result.
KEPT = """
%both (a: u16[28,8,128], b: f32[8,128], n: s32[]) -> (u16[28,8,128], bf16[8,128]) {
  %a = u16[28,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[8,128]{1,0:T(8,128)} parameter(1)
  %n = s32[]{:T(128)} parameter(2)
  %rounded = bf16[8,128]{1,0:T(8,128)(2,1)} convert(%b)
  %bits = u16[1,8,128]{2,1,0:T(8,128)(2,1)} bitcast-convert(%rounded)
  %zero = s32[]{:T(128)} constant(0)
  %put = u16[28,8,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%a, %bits, %n, %zero, %zero)
  ROOT %t = (u16[28,8,128]{2,1,0:T(8,128)(2,1)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%put, %rounded)
}

ENTRY %main (x: u16[28,8,128], y: f32[8,128], i: s32[]) -> (u16[28,8,128], bf16[8,128]) {
  %x = u16[28,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[8,128]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  ROOT %z = (u16[28,8,128]{2,1,0:T(8,128)(2,1)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) fusion(%x, %y, %i), kind=kLoop, calls=%both
}
"""  # noqa: E501


def test_an_update_beside_another_result_writes_its_part():
    # The result itself stays in VMEM.
    assert memory_traffic(KEPT, trips=()) == MemoryTraffic(4 * 8 * 128, 2 * 8 * 128)


def test_products_are_counted_with_their_loops():
    x, w = jnp.zeros((64, 32)), jnp.zeros((5, 32, 32))

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    text = jax.jit(layers).lower(x, w).compile().as_text() or ""
    assert sum(one.flops for one in program_work(text, trips=())) == 5 * 2 * 64 * 32 * 32


# As XLA writes collectives for GPUs: an all-reduce has the shape of its results alone.
STARTED = """
ENTRY %main (a: f32[8], b: bf16[16], c: bf16[4]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = bf16[16]{0} parameter(1)
  %c = bf16[4]{0} parameter(2)
  %sum = f32[8]{0} all-reduce-start(%a), to_apply=%add
  %reduced = f32[8]{0} all-reduce-done(%sum)
  %begun = ((bf16[16]{0}, bf16[4]{0}), (bf16[64]{0}, bf16[16]{0})) all-gather-start(%b, %c)
  %gathered = (bf16[64]{0}, bf16[16]{0}) all-gather-done(%begun)
  ROOT %out = f32[8]{0} copy(%reduced)
}
"""


def test_collectives_started_on_several_arrays():
    # One sum and the last copy move 32 bytes each, the parts of the gather 32 and 8.
    assert memory_traffic(STARTED, trips=()) == MemoryTraffic(2 * 32 + 40, 2 * 32 + 40)


# As libtpu writes products: features i are summed; of the windows only a contracted one is.
PRODUCT = """
%product (a: bf16[64,32], b: bf16[32,48]) -> f32[64,48] {
  %a = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[32,48]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = f32[64,48]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
}

%offloaded () -> () {
  %k = f32[8]{0:T(1024)} constant({...})
  %l = f32[8]{0:T(1024)} negate(%k), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %n = () tuple()
}

ENTRY %main (x: bf16[64,32], y: bf16[32,48], p: bf16[4,8,32], q: bf16[4,32,16]) -> f32[64,48] {
  %x = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[32,48]{1,0:T(8,128)(2,1)} parameter(1)
  %p = bf16[4,8,32]{2,1,0:T(8,128)(2,1)} parameter(2)
  %q = bf16[4,32,16]{2,1,0:T(8,128)(2,1)} parameter(3)
  %batched = f32[4,8,16]{2,1,0:T(8,128)} convolution(%p, %q), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf, backend_config={"estimated_cycles":"700"}
  %summed = f32[1,8,16]{2,1,0:T(8,128)} convolution(%p, %q), window={size=4}, dim_labels=0bf_0io->0bf
  %begun = ((), (), s32[]{:S(2)}) call-start(), async_execution_thread="sparsecore", to_apply=%offloaded
  %ended = () call-done(%begun)
  ROOT %z = f32[64,48]{1,0:T(8,128)} fusion(%x, %y), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"90"}
}
"""  # noqa: E501


def test_products_and_cycles_of_a_tpu_program():
    work = [one for one in program_work(PRODUCT, trips=()) if one.flops]
    each = 2 * 4 * 8 * 32 * 16  # four products of a batch, or one whose four parts are summed
    assert [(one.flops, one.cycles) for one in work] == [
        (each, 700),
        (each, 0),
        (2 * 64 * 32 * 48, 90),
    ]
    negated = [one for one in program_work(PRODUCT, trips=()) if one.computation == "offloaded"]
    assert [(one.read, one.written, one.cycles) for one in negated] == [(32, 32, 0)]


# As XLA for GPUs writes a Pallas kernel; the bytes of its code are left out.
KERNEL = r"""
ENTRY %main (q: bf16[4,128], cache: u16[36,4096,128]) -> f32[4,128] {
  %q = bf16[4,128]{1,0} parameter(0)
  %cache = u16[36,4096,128]{2,1,0} parameter(1)
  ROOT %k = f32[4,128]{1,0} custom-call(%q, %cache), custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 256 : i32, ir = "ML\EFR", serialized_metadata = "{\22bytes\22: \221048576\22}"}
}
"""  # noqa: E501


def test_kernel_reads_what_its_metadata_states():
    assert memory_traffic(KERNEL, trips=()) == MemoryTraffic(1048576, 4 * 128 * 4)
    assert memory_traffic(KERNEL.replace("bytes", "other"), trips=()).read > 36 * 4096 * 128 * 2


def test_kernel_has_the_products_that_its_metadata_states():
    (one,) = program_work(KERNEL.replace("bytes", "flops"), trips=())
    assert (one.flops, one.read) == (1048576, 4 * 128 * 2 + 36 * 4096 * 128 * 2)


# As libtpu writes grouped products: rows by the matrix of their group, and rows by rows.
GROUPED = """
ENTRY %main (s: s32[16], n: s32[1], x: bf16[4096,512], y: bf16[16,512,768], d: bf16[4096,768]) -> f32[16,512,768] {
  %s = s32[16]{0:T(128)} parameter(0)
  %n = s32[1]{0:T(128)} parameter(1)
  %x = bf16[4096,512]{1,0:T(8,128)(2,1)} parameter(2)
  %y = bf16[16,512,768]{2,1,0:T(8,128)(2,1)} parameter(3)
  %d = bf16[4096,768]{1,0:T(8,128)(2,1)} parameter(4)
  %ragged-dot-metadata = s32[47]{0:T(128)} custom-call(%s), custom_call_target="tpu_custom_call"
  %ragged-dot-none.1 = f32[4096,768]{1,0:T(8,128)} custom-call(%n, %ragged-dot-metadata, %x, %y), custom_call_target="tpu_custom_call"
  ROOT %ragged-dot-none = f32[16,512,768]{2,1,0:T(8,128)} custom-call(%n, %ragged-dot-metadata, %x, %d), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


def test_grouped_products_on_a_tpu_multiply_each_row_by_one_matrix():
    work = {one.instruction.name: one for one in program_work(GROUPED, trips=())}
    each = 2 * 4096 * 512 * 768
    flops = {name: one.flops for name, one in work.items()}
    assert flops == {"ragged-dot-metadata": 0, "ragged-dot-none.1": each, "ragged-dot-none": each}
