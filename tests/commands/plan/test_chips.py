"""Rates of products by data sheets, against the precisions that a platform accepts."""

import jax
import pytest

from jaxrl.commands.plan.chips import CHIPS, GPUS, TPUS, Chip, products
from jaxrl.commands.plan.gpu import gpu_devices, memory_fraction
from jaxrl.core.precision import PRESETS, PRODUCTS, check_products, parse


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
    assert memory_fraction() == 0.75
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")
    assert memory_fraction() == 0.92


def test_missing_compiler_error_names_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ModuleNotFoundError, match=f"pip install jax-cuda12-plugin=={jax.__version__}"
    ):
        gpu_devices("h100", hosts=1, each=8)
