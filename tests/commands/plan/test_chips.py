"""Rates of products by data sheets, against the precisions that a platform accepts."""

import jax
import pytest

from jaxrl.builders.gpu_memory import jax_share
from jaxrl.commands.plan.chips import CHIPS, GPUS, TPUS, Chip, products
from jaxrl.commands.plan.gpu import gpu_devices
from jaxrl.commands.plan.kernels import is_splash, kernel_seconds
from jaxrl.core.precision import PRESETS, PRODUCTS, check_products, parse
from jaxrl.sharding import program_work


def rate(precision: str, chip: Chip) -> float:
    found = products(parse(precision), chip)
    assert found is not None
    return found.rate


def test_products_by_hand():
    assert rate("fp32", CHIPS["h100"]) == 67e12
    assert rate("fp32,products=tf32", CHIPS["h100"]) == 494.7e12
    assert rate("fp32,products=tf32x3", CHIPS["a100"]) == 52e12
    assert rate("fp16_master", CHIPS["b200"]) == 2250e12
    # Six products of bf16 parts for an f32, three for an f16.
    assert rate("fp32", CHIPS["v5p"]) == 459e12 / 6
    assert rate("fp16_master", CHIPS["v5e"]) == 197e12 / 3
    # Half a chip of 2307 TFLOP/s.
    assert rate("bf16_master", CHIPS["tpu7x"]) == 1153.5e12


@pytest.mark.parametrize(("platform", "chips"), [("gpu", GPUS), ("tpu", TPUS)])
def test_every_accepted_precision_has_a_rate(platform, chips):
    accepted = [
        f"fp32,products={name}" for name, (_, there) in PRODUCTS.items() if platform in there
    ]
    for precision in (*accepted, *PRESETS):
        check_products(parse(precision), platform)
        for chip in chips.values():
            assert 0 < rate(precision, chip) <= rate("bf16_master", chip)


def test_unknown_rates():
    assert products(parse("bf16_master"), Chip(memory=1.0)) is None
    assert products(parse("fp32,compute=f64"), CHIPS["h100"]) is None


def test_jax_preallocates_part_of_gpu_memory(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert jax_share() == 0.75
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")
    assert jax_share() == 0.92


def test_missing_compiler_error_names_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ModuleNotFoundError, match=f"pip install jax-cuda12-plugin=={jax.__version__}"
    ):
        gpu_devices("h100", hosts=1, each=8)


# As libtpu writes splash attention, for one row and for two: what only reads from a kernel names it
# as well.
SPLASH = """
%reshaped (x: bf16[1,32,4096,128]) -> bf16[32,4096,128] {
  %x = bf16[1,32,4096,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %y = bf16[32,4096,128]{2,1,0:T(8,128)(2,1)} bitcast(%x)
}

ENTRY %main (q: bf16[32,4096,128], k: bf16[8,4096,128], two: bf16[32,8192,128], keys: bf16[8,8192,128], seen: s8[1,8,8], first: s32[1], seen_of_two: s8[1,16,8], pairs: s32[128], numbers: f32[32,1,8192], of_queries: s32[2,1,4096], of_keys: s32[2,4096,128], sinks: f32[32]) -> bf16[32,4096,128] {
  %q = bf16[32,4096,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[8,4096,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %two = bf16[32,8192,128]{2,1,0:T(8,128)(2,1)} parameter(2)
  %seen = s8[1,8,8]{2,1,0:T(8,128)(4,1)} parameter(3)
  %first = s32[1]{0} parameter(4)
  %seen_of_two = s8[1,16,8]{2,1,0:T(8,128)(4,1)} parameter(5)
  %keys = bf16[8,8192,128]{2,1,0:T(8,128)(2,1)} parameter(6)
  %pairs = s32[128]{0} parameter(7)
  %numbers = f32[32,1,8192]{2,1,0:T(1,128)} parameter(8)
  %of_queries = s32[2,1,4096]{2,1,0:T(1,128)} parameter(9)
  %of_keys = s32[2,4096,128]{2,1,0:T(8,128)} parameter(10)
  %sinks = f32[32]{0} parameter(11)
  %tpu_custom_call.1 = bf16[1,32,4096,128]{3,2,1,0:T(8,128)(2,1)} custom-call(%q), custom_call_target="tpu_custom_call", metadata={op_name="pallas_call"}
  %q_ref = bf16[32,4096,128]{2,1,0:T(8,128)(2,1)} fusion(%tpu_custom_call.1), kind=kLoop, calls=%reshaped, metadata={op_name="splash_mha_fwd_segmented/pallas_call/squeeze"}
  %splash_mha_fwd_segmented.1 = bf16[32,4096,128]{2,1,0:T(8,128)(2,1)} custom-call(%seen, %q_ref, %k, %k), custom_call_target="tpu_custom_call"
  %splash_mha_fwd_segmented.2 = bf16[32,8192,128]{2,1,0:T(8,128)(2,1)} custom-call(%seen_of_two, %two, %keys, %keys), custom_call_target="tpu_custom_call"
  %splash_mha_gradients.1 = (bf16[32,8192,128]{2,1,0:T(8,128)(2,1)}, bf16[8,8192,128]{2,1,0:T(8,128)(2,1)}, bf16[8,8192,128]{2,1,0:T(8,128)(2,1)}) custom-call(%first, %pairs, %two, %keys, %keys, /*index=5*/%two, %numbers, %numbers, %of_queries, %of_keys), custom_call_target="tpu_custom_call"
  %jvp_splash_mha_forward_.1 = (bf16[32,8192,128]{2,1,0:T(8,128)(2,1)}, f32[32,1,8192]{2,1,0:T(1,128)}) custom-call(%first, %pairs, %first, %sinks, %two, /*index=5*/%keys, %keys, %of_queries, %of_keys), custom_call_target="tpu_custom_call"
  %splash_mha_dkv_segmented.2 = (bf16[8,4096,128]{2,1,0:T(8,128)(2,1)}, bf16[8,4096,128]{2,1,0:T(8,128)(2,1)}) custom-call(%seen, %q_ref, %k, %k), custom_call_target="tpu_custom_call"
  ROOT %out = bf16[32,4096,128]{2,1,0:T(8,128)(2,1)} fusion(%tpu_custom_call.1), kind=kOutput, calls=%reshaped
}
"""  # noqa: E501


_OF_BLOCKS = ("fwd_segmented.1", "fwd_segmented.2", "dkv_segmented.2")


def test_only_kernels_have_a_kernels_time():
    work = {one.instruction.name: one for one in program_work(SPLASH, trips=())}
    seconds = {name: kernel_seconds(one, kind="v6e") for name, one in work.items()}
    kernels = {"tpu_custom_call.1", *(name for name in work if "splash" in name)}
    assert {name for name, found in seconds.items() if found} == kernels
    attention = {name for name, one in work.items() if is_splash(one.instruction)}
    assert attention == kernels - {"tpu_custom_call.1"}
    forward, both_rows, apart = (seconds[f"splash_mha_{name}"] for name in _OF_BLOCKS)
    assert both_rows == 2 * forward
    # Bundles of both rows.
    for name, of_head in (
        ("jvp_splash_mha_forward_.1", 28 * 674 + 8 * 909 + 3187),
        ("splash_mha_gradients.1", 28 * 1471 + 8 * 1754 + 3204),
    ):
        assert seconds[name] * 1.751e9 == pytest.approx(64 * of_head, rel=1e-3)
    # Of a block: those of keys and values alone.
    assert apart / forward == pytest.approx(1409 / 981)
    multiplies = work["tpu_custom_call.1"]._replace(flops=1e15)
    assert kernel_seconds(multiplies, kind="v6e") == 1e15 / 918e12


def test_the_kernel_of_all_gradients_takes_the_blocks_of_the_last_device():
    (work,) = (one for one in program_work(SPLASH, trips=()) if "gradients" in one.instruction.name)
    _, pairs, q, k, v, dout, *numbers, _, of_keys = work.shapes
    quarter = [(heads, tokens // 4, width) for heads, tokens, width in (q, dout)]
    own = work._replace(shapes=((1,), pairs, quarter[0], k, v, quarter[1], *numbers, of_keys))
    bundles = kernel_seconds(own, kind="v6e") * 1.751e9
    assert bundles == pytest.approx(64 * (13 * 1471 + 2 * 1754 + 3204 / 4), rel=1e-3)


@pytest.mark.parametrize("name", ["splash_mha_fwd_segmented.1", "splash_mha_dkv_segmented.2"])
@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (1, 4), (2, 4), (2, 1)])
def test_splash_takes_the_blocks_of_the_last_device(name, rows, parts):
    """The last of `parts` devices has the end of each row's queries, and all keys."""
    (work,) = (one for one in program_work(SPLASH, trips=()) if one.instruction.name == name)
    whole, own = 8, 8 // parts  # blocks of a row's keys, and of its queries on a device
    lists = (1, own, rows * whole) if "dkv" in name else (1, rows * own, whole)
    queries, keys = ((n, rows * blocks * 512, 128) for n, blocks in ((32, own), (8, whole)))
    found = kernel_seconds(work._replace(shapes=(lists, lists, queries, keys, keys)), kind="v6e")
    seen = sum(j <= i for i in range(whole - own, whole) for j in range(whole))
    assert found / kernel_seconds(work, kind="v6e") == pytest.approx(rows * seen / 36)
