"""The publish protocol as a model: whatever is killed, lost, late or damaged, no token has a label
whose version its server does not hold, and the next undisturbed publish heals.

It tries 12 sequences of 16 steps, always the same ones. JAXRL_MUTATIONS=1000 tries as many, of 40
steps, and prints what struck:

    JAXRL_MUTATIONS=1000 .venv-test/bin/python -m pytest -s --timeout 0 tests/bridge/protocol
"""

import os
from collections import Counter

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.bridge.protocol.scene import Scene
from tests.bridge.protocol.world import Fault

COUNT = int(os.environ.get("JAXRL_MUTATIONS", "0"))
TRIED, STRUCK = Counter[str](), Counter[str]()
STEPS = (
    "/fetch_weights",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
)
AGAIN = ("/health", "/init_weight_transfer_engine")  # of a server that failed
ON_REQUESTS = (
    *(f"{what} {when}" for what in ("kill learner", "kill server") for when in ("before", "after")),
    *(f"{what} {when}" for what in ("suspend", "deliver") for when in ("before", "after")),
    "lose request",
    "lose answer",
    "reset",
    "late",
)
IN_STORE = {
    "put": (4, ("kill", "kill after", "lose", "damage", "fail")),
    "get": (9, ("kill", "lose", "damage", "fail")),
    "delete": (1, ("kill", "lose", "fail")),
    "list": (0, ("kill", "fail")),
}
ON_HOSTS = {"disk": (40, ("kill", "fail")), "load": (5, ("kill", "fail")), "label": (2, ("kill",))}


def on(
    sites: dict[str, tuple[int, tuple[str, ...]]], *, most: int
) -> st.SearchStrategy[list[Fault]]:
    """Draws faults of these kinds, up to this occurrence of each site."""
    one = st.sampled_from(sorted(sites)).flatmap(
        lambda site: st.builds(
            Fault, st.just(site), st.integers(0, sites[site][0]), st.sampled_from(sites[site][1])
        )
    )
    return st.lists(one, min_size=1, max_size=most)


PUBLISHING = on({path: (2, ON_REQUESTS) for path in STEPS}, most=3)
CONNECTING = on({AGAIN[0]: (1, ON_REQUESTS), AGAIN[1]: (2, ON_REQUESTS)}, most=2)


class Protocol(RuleBasedStateMachine):
    """Every rule is something that happens in operation."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.world = self.scene.world

    def teardown(self) -> None:
        try:
            self.scene.heal()
        finally:
            self.scene.close()
            TRIED.update(sequences=1, events=self.world.events)
            STRUCK.update(self.world.struck)

    @invariant()
    def labels_and_slots_are_true(self) -> None:
        self.scene.check()
        TRIED["steps"] += 1

    @rule(
        share=st.sampled_from([0.02, 0.0, 1.0]),
        faults=PUBLISHING | st.builds(list.__add__, CONNECTING, PUBLISHING),
        order=st.permutations(range(3)),
        meanwhile=st.sampled_from(["wait", "take_over"]),
        again=st.booleans(),
    )
    def publish_on_a_bad_network(self, share, faults, order, meanwhile, again) -> None:
        self.scene.meanwhile = getattr(self.scene, meanwhile)
        self.scene.pool.order = order
        self._publish(share, faults, again=again)

    @rule(
        share=st.sampled_from([0.02, 0.0, 1.0]),
        faults=on(IN_STORE, most=4) | on(ON_HOSTS, most=3),
        again=st.booleans(),
    )
    def publish_with_bad_hosts_and_stores(self, share, faults, again) -> None:
        self._publish(share, faults, again=again)

    @rule(share=st.sampled_from([0.02, 0.0, 1.0]))
    def publish(self, share) -> None:
        self._publish(share, [], again=True)

    def _publish(self, share: float, faults: list[Fault], *, again: bool) -> None:
        """A failure ends the learner, or it publishes `again`."""
        self.scene.ensure_learner()
        self.scene.change(share)
        self.world.plan(faults)
        if not self.scene.publish() and not again:
            self.scene.end()
        self.world.plan([])

    @rule(
        name=st.sampled_from(["one", "another"]),
        replaces=st.sampled_from(["", "one", "another"]),
        faults=st.just([]) | CONNECTING | on(IN_STORE, most=1),
    )
    def start(self, name, replaces, faults) -> None:
        """The learner before is killed, if there was one."""
        self.scene.meanwhile = self.scene.wait
        self.world.plan(faults)
        self.scene.start(name, replaces=replaces)
        self.world.plan([])

    @rule(faults=st.just([]) | on(IN_STORE, most=1))
    def end(self, faults) -> None:
        self.world.plan(faults)
        self.scene.end()
        self.world.plan([])

    @rule(which=st.integers(0, 2), again=st.booleans(), agent=st.booleans())
    def kill(self, which, again, agent) -> None:
        server = self.scene.servers[which]
        if agent:
            server.host.kill()
            return
        server.stop()
        if again:
            server.start()

    @precondition(lambda self: self.world.objects)
    @rule(data=st.data(), damage=st.booleans())
    def lose_or_damage_an_object(self, data, damage) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.objects)))
        if damage:
            self.world.objects[name] = self.world.objects[name][:-1] + b"?"
        else:
            del self.world.objects[name]

    @rule(
        store=st.sampled_from([0.0, 0.0, 10.0, 60.0, 300.0]),
        step=st.sampled_from([0.0, -1e8, -1.0, 3600.0]),
        seconds=st.sampled_from([0.3, 20.0, 40.0, 700.0]),
    )
    def time_passes(self, store, step, seconds) -> None:
        """The store may be down for a while, and clocks may step."""
        self.world.wall += step
        self.scene.wait(seconds)
        self.world.down_until = self.world.now + store

    @rule(which=st.integers(0, 2))
    def deliver_late_request(self, which) -> None:
        server = self.scene.servers[which]
        if server.late and server.alive:
            self.scene.network.deliver(server)

    @rule()
    def heal(self) -> None:
        self.scene.heal()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=COUNT or 12,
    stateful_step_count=40 if COUNT else 16,
    phases=(Phase.generate, Phase.shrink),  # to explain a failure takes longer than to find it
)


def teardown_module() -> None:
    if COUNT:
        print(dict(TRIED), STRUCK.total(), "faults:", dict(STRUCK.most_common()))
