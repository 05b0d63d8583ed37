import dataclasses

import jax
import pytest
from jax.sharding import AxisType

from jaxrl.sharding.mesh import AXES, make_mesh


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 8}, (8, 1, 1, 1, 1)),
        ({"fsdp": -1}, (1, 8, 1, 1, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 1, 2)),
        ({"data": -1, "tensor": 4}, (2, 1, 1, 1, 4)),
        ({"data": -1, "fsdp": 8}, (1, 8, 1, 1, 1)),
        ({"expert": 4, "context": 2}, (1, 1, 4, 2, 1)),
    ],
)
def test_sizes_multiply_to_the_devices(sizes, expected):
    mesh = make_mesh(**sizes)
    assert tuple(mesh.shape.items()) == tuple(zip(AXES, expected, strict=True))
    assert mesh.devices.size == 8
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_some_devices_only():
    chosen = jax.devices()[2:4]
    assert list(make_mesh(tensor=2, devices=chosen).devices.flat) == chosen


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, r"mesh of one device needs 1 device and there are 8"),
        ({"data": 3}, r"data=3 needs 3 devices and there are 8"),
        ({"data": -1, "tensor": 3}, r"multiply to 3, which does not divide the 8 devices"),
        ({"data": -1, "fsdp": -1}, r"only one of data, fsdp can be -1"),
        ({"data": 0}, r"data=0: a size is a positive number"),
        ({"data": -2}, r"data=-2: a size is a positive number"),
    ],
)
def test_mesh_must_fit_the_devices(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What jax asks of a TPU's chip in order to arrange it."""

    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0
    process_index: int = 0

    @property
    def id(self) -> int:
        x, y, z = self.coords
        return x + 4 * (y + 4 * z)


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 64}, {"fsdp": 8, "expert": 8}, {"data": 32, "tensor": 2}]
)
def test_mesh_may_differ_from_topology(sizes):
    chips = [Chip((x, y, z)) for z in range(4) for y in range(4) for x in range(4)]
    mesh = make_mesh(**sizes, devices=chips)
    assert {axis: n for axis, n in mesh.shape.items() if n > 1} == sizes
    assert {chip.id for chip in mesh.devices.flat} == set(range(64))
