"""The workers of a fleet, on the side that starts them: their number follows what users ask for."""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.config.fleet import FleetConfig, read_resources
from jaxrl.fleet.engine import free, import_ray
from jaxrl.fleet.events import Events
from jaxrl.fleet.placement import Slot
from jaxrl.fleet.wanted import Wanted
from jaxrl.fleet.worker import Worker
from jaxrl.fleet.workers import worker_name


class Pool:
    """Workers, numbered from 0, in the slots of the run and in further ones."""

    def __init__(
        self,
        config: FleetConfig,
        slots: Sequence[Slot],
        *,
        directory: Path,
        wanted: Wanted,
        events: Events,
    ) -> None:
        """Starts a worker in each slot. `directory` is where the run's paths start."""
        self._config, self._directory, self._events = config, directory, events
        self._slots, self._wanted = list(slots), wanted
        self._own = len(slots)  # slots that the run keeps; others are reserved as they are needed
        self._actors: list[Any] = []
        # New workers without a place yet: the answer that tells of it, and when to say so.
        self._due: dict[int, tuple[Any, float]] = {}
        for slot in slots:
            self._start(slot)

    def __len__(self) -> int:
        return len(self._actors)

    def look(self) -> None:
        """Starts or ends workers until there are as many as are asked for, and tells of new ones
        that are placed, or cannot be."""
        ray, wanted, before = import_ray(), self._wanted.read(), len(self)
        if self._own and wanted is not None and wanted != before:
            self._events.note(f"{wanted} workers asked for, {before} before")
            self._events.write("fleet", "resized", workers=wanted)
            while len(self) > wanted:
                self._end()
            while len(self) < wanted:
                self._add()
        for index, (placed, due) in list(self._due.items()):
            if ray.wait([placed], timeout=0)[0]:
                del self._due[index]
                self._events.write(f"worker {index}", "started")
            elif due < time.monotonic():
                self._due[index] = placed, math.inf
                there = ", ".join(f"{k} {v:g}" for k, v in sorted(free().items())) or "nothing"
                self._events.note(
                    f"worker {index} waits for {', '.join(self._config.worker_resources)}; free "
                    f"are: {there}. It starts as soon as a node has that much"
                )

    def restart(self) -> None:
        """Starts all workers anew: what they play is of a learner that has ended."""
        for actor in self._actors:
            import_ray().kill(actor, no_restart=False)

    def close(self) -> None:
        """Ends all workers."""
        while self._actors:
            self._end()

    def _add(self) -> None:
        index = len(self)
        if index == len(self._slots):
            each = read_resources(self._config.worker_resources)
            group = import_ray().util.placement_group([each])
            self._slots.append(Slot(group, 0, each))
            self._due[index] = group.ready(), time.monotonic() + self._config.wait
        else:
            self._events.write(f"worker {index}", "started")
        self._start(self._slots[index])

    def _start(self, slot: Slot) -> None:
        path = [str(self._directory), *filter(None, sys.path)]
        kind = slot.actor(Worker, name=worker_name(len(self)), max_restarts=-1, max_task_retries=0)
        processors = max(1, math.ceil(slot.resources.get("CPU", 1)))
        self._actors.append(kind.remote(str(self._directory), path, processors=processors))

    def _end(self) -> None:
        ray, index = import_ray(), len(self) - 1
        ray.kill(self._actors.pop())
        self._due.pop(index, None)
        if index >= self._own:
            ray.util.remove_placement_group(self._slots.pop().group)
        self._events.write(f"worker {index}", "removed")
