"""Parts of beta: each rounding belongs to one module, and the parts add up to beta."""

import jax
import pytest

from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import Precision
from jaxrl.diagnostics.ratio.attribution import MODULES, attribute
from jaxrl.models import lora
from jaxrl.models.model import decoder
from tests import tiny

CASES = {"dense": tiny.CONFIG, "experts": tiny.MOE}


def attributed(config, precision, *, params=None, **changes):
    model, params = decoder(config), params or tiny.params(config=config)
    rollouts = tiny.rollouts(48, longest=24)
    shape = MinibatchShape(row_length=64, rows_per_microbatch=8)
    minibatch = pack_minibatch(rollouts, [1.0] * len(rollouts), shape=shape)
    return attribute(model, params, minibatch, precision=precision, **changes)


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_to_the_whole(name):
    """In variance, within 20 %."""
    found = attributed(CASES[name], "phantom")
    numbers = found.numbers()
    assert found.parts.keys() - {"router"} == {"weights", "rest", *MODULES}
    assert ("router" in found.parts) == (name == "experts")
    assert numbers["whole_std"] > 1e-3
    assert numbers["sum_std"] ** 2 == pytest.approx(numbers["whole_std"] ** 2, rel=0.2)
    # The modules have all of the sampler's roundings: what is left is the order of additions.
    assert numbers["rest_std"] < 0.35 * numbers["whole_std"]
    assert sum(v for k, v in numbers.items() if k.endswith("_share")) == pytest.approx(1)


def test_one_role_is_one_part():
    """A sampler that differs by its weights, also with adapters, or by its head, alone."""
    specs = lora.adapter_specs(decoder(tiny.CONFIG).specs, rank=3, targets=["*_proj"])
    adapted = lora.Adapted(tiny.drawn(specs, 0), tiny.params(), alpha=6.0)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    given = {"params": adapted, "param_shardings": jax.tree.map(lambda _: here, adapted)}
    weights = attributed(tiny.CONFIG, "fp32,wire=bf16", **given).numbers()
    assert weights["weights_share"] == pytest.approx(1, abs=1e-6)
    assert weights["weights_std"] == pytest.approx(weights["whole_std"], rel=1e-6)
    rounded = Precision.of("fp32,logits=bf16")
    head = attributed(tiny.CONFIG, "fp32", served=rounded).numbers()
    assert head["head_share"] == pytest.approx(1, abs=1e-6)
    assert head["head_std"] == pytest.approx(head["whole_std"], rel=1e-6)


def test_operands_of_8_bits_are_a_part():
    """Of a server that has them while the learner has none."""
    found = attributed(tiny.CONFIG, "fp32", served="fp32,blocks=int8")
    numbers = found.numbers()
    assert numbers["whole_std"] > 1e-3
    assert numbers["blocks_share"] == pytest.approx(1, abs=1e-6)
    assert numbers["rest_std"] < 1e-3 * numbers["whole_std"]


def test_narrow_learner_is_refused():
    with pytest.raises(ValueError, match="compute = float16 does not hold the sampler's bfloat16"):
        attributed(tiny.CONFIG, "fp16_master,sampler=bf16")
