"""Each process gets its own tensors whole, and no device does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.bridge.exchange import Exchange, Form
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.traffic import collectives

BF16 = np.dtype(jnp.bfloat16)
LAYERS = np.random.default_rng(0).normal(size=(5, 16, 24)).astype(np.float32)
FSDP = (None, None, "fsdp")
BOTH = (None, "tensor", ("data", "fsdp"))
PAIRS = [0, 0, 1, 1, 2, 2, 3, 3]


def start(sizes, spec, homes, **form) -> Exchange:
    sharding = NamedSharding(make_mesh(**sizes), PartitionSpec(*spec))
    form = {"stacked": True, "transposed": False, "dtype": BF16} | form
    return Exchange(jax.device_put(LAYERS, sharding), Form(**form), homes=homes)


def received(one: Exchange, wanted, homes):
    """What each process assembles from what its own devices received."""
    parts = one.copy(one.send(wanted))
    return {
        home: one.receive({i: part for i, part in parts.items() if homes[i] == home})
        for home in wanted
    }


@pytest.mark.parametrize(
    ("sizes", "spec", "homes", "share"),
    [
        # The share of a tensor that a device receives.
        ({"fsdp": 8}, FSDP, PAIRS, 1 / 2),
        ({"fsdp": 8}, FSDP, [3, 1, 0, 2, 1, 3, 2, 0], 1 / 2),  # as on chips in another order
        ({"fsdp": 8}, FSDP, range(8), 1),
        ({"fsdp": 4, "tensor": 2}, BOTH, PAIRS, 1 / 2),
        ({"data": 2, "fsdp": 2, "tensor": 2}, BOTH, [0, 1] * 4, 1 / 4),
        ({"data": 2, "fsdp": 4}, FSDP, PAIRS, 1 / 2),  # two processes have all parts
        ({"data": 4, "fsdp": 2}, FSDP, PAIRS, 0),  # each has
        ({"data": 8}, FSDP, PAIRS, 0),
        # Parts 0 and 1 are in three processes, parts 2 and 3 in two: not as a mesh has them.
        ({"data": 2, "fsdp": 4}, FSDP, [0, 0, 1, 1, 2, 3, 2, 3], 1),
    ],
)
def test_each_process_gets_the_layer_that_it_wants(sizes, spec, homes, share):
    homes = [*homes]
    wanted = {home: (3 * home + 1) % 5 for home in homes[1:]}
    one = start(sizes, spec, homes)
    for home, tensor in received(one, wanted, homes).items():
        assert tensor.tobytes() == LAYERS[wanted[home]].astype(BF16).tobytes()
    text = one.lower(wanted).compile().as_text()
    sizes = {kind: one.size for kind, one in collectives(text).items()}
    nbytes = share * LAYERS[0].size * BF16.itemsize
    assert sizes == ({"all-to-all": nbytes} if share else {})


@pytest.mark.parametrize("stacked", [True, False])
def test_conversion_to_hugging_faces_form(stacked):
    one = start({"fsdp": 4, "tensor": 2}, BOTH, PAIRS, stacked=stacked, transposed=True)
    tensor = (LAYERS[4] if stacked else LAYERS).swapaxes(-1, -2).astype(BF16)
    (found,) = received(one, {2: 4}, PAIRS).values()
    np.testing.assert_array_equal(found, tensor)


def test_processes_with_different_numbers_of_devices_are_refused():
    with pytest.raises(ValueError, match="3 in process 0, 5 in process 1; give each the same"):
        start({"fsdp": 8}, FSDP, [0] * 3 + [1] * 5)
