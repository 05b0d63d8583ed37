"""Orders of events that were once wrong, on the simulation of the model."""

from collections.abc import Iterator

import pytest

from tests.bridge.protocol.scene import Scene
from tests.bridge.protocol.world import Fault


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene() as made:
        made.start("one")
        assert made.publish()
        yield made


@pytest.mark.parametrize(
    ("late", "when"),
    [
        ("/finish_weight_update", "/finish_weight_update"),
        ("/resume", "/update_weights"),
        ("/pause", "/update_weights"),
        ("/start_weight_update", "/start_weight_update"),
        ("/update_weights", "/update_weights"),
    ],
)
def test_a_request_of_an_earlier_publish_comes_late(scene: Scene, late: str, when: str) -> None:
    """A link swallows it, the learner gives up, and the network delivers it within the next
    publish: no label may name other weights, and the publish must arrive."""
    for site, kind in ((late, "late"), (when, "deliver before")):
        scene.change(0.1)
        scene.world.plan([Fault(site, 0, kind)])
        scene.publish()
    scene.wait()
    scene.check()
    scene.heal()
