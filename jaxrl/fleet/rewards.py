"""Reward functions and tools that the workers of a fleet load."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.environments import Reward, load_rewards, load_tools
from jaxrl.fleet.workers import Died, Workers

_PARTS = 4  # of the completions for each worker, so that a slow one holds up little


class Spec(NamedTuple):
    """The reward functions of a key of a config."""

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    timeout: float  # seconds per call
    key: str


class RemoteReward(NamedTuple):
    """One term of the reward, whose function the workers call."""

    name: str  # in metrics and messages
    weight: float  # its factor in the sum
    takes_all: bool  # its function takes all completions at once
    spec: Spec
    index: int  # of its function in the spec
    workers: Workers

    def apply(
        self, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
    ) -> list[float | str]:
        """Returns as `Reward.apply`, in the order of the completions. A completion that ends every
        worker that scores it has failed.

        Raises:
          RuntimeError: if no worker is there for five minutes.
        """
        count = len(completions)
        parts = min(count, 1 if self.takes_all else _PARTS * self.workers.count)
        # The larger parts first, so that workers end at about the same time.
        size, larger = divmod(count, max(1, parts))
        ends = [size * i + min(i, larger) for i in range(parts + 1)]
        pieces = [slice(*pair) for pair in itertools.pairwise(ends)]

        def values(some: Sequence[slice]) -> list[list[float | str]]:
            calls = []
            for piece in some:
                rows = [dict(example) for example in examples[piece]]
                # One of several completions may be to blame, and each is then tried alone.
                tries = {} if self.takes_all or len(rows) == 1 else {"tries": 1}
                texts = list(completions[piece])
                calls.append(
                    self.workers.submit(apply, self.spec, self.index, texts, rows, **tries)
                )
            found = []
            for piece, call in zip(some, calls, strict=True):
                size, result = piece.stop - piece.start, call.result()
                if isinstance(result, Died) and size > 1 and not self.takes_all:
                    alone = [slice(i, i + 1) for i in range(piece.start, piece.stop)]
                    result = list(itertools.chain(*values(alone)))
                found.append([result.text] * size if isinstance(result, Died) else result)
            return found

        return list(itertools.chain(*values(pieces)))


def load_remote_rewards(
    workers: Workers,
    paths: Sequence[str],
    weights: Sequence[float] = (),
    *,
    timeout: float = 60.0,
    key: str = "reward.path",
) -> list[RemoteReward]:
    """Has the reward functions that a config names loaded by a worker, and by the others when they
    are first called; raises as `load_rewards`."""
    spec = Spec(tuple(paths), tuple(weights), timeout, key)
    found = workers.submit(facts, spec).result()
    if isinstance(found, Died):
        raise ValueError(f"{key} = {list(paths)}: {found.text} while it imported them")
    return [
        RemoteReward(name, weight, takes_all, spec, i, workers)
        for i, (name, weight, takes_all) in enumerate(found)
    ]


def tool_schemas(workers: Workers, references: Sequence[str]) -> list[dict[str, Any]]:
    """Has the tools that a config names loaded by a worker; returns their schemas, and raises as
    `load_tools`."""
    found = workers.submit(_schemas, tuple(references)).result() if references else []
    if isinstance(found, Died):
        named = f"environment.tools = {list(references)}"
        raise ValueError(f"{named}: {found.text} while it imported them")
    return found


def _schemas(references: Sequence[str]) -> list[dict[str, Any]]:
    return [tool.schema for tool in load_tools(references).values()]


def facts(spec: Spec) -> list[tuple[str, float, bool]]:
    """Loads rewards in a worker; returns name, weight and `takes_all` of each."""
    return [(term.name, term.weight, term.takes_all) for term in _terms(spec)]


def apply(
    spec: Spec, index: int, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
) -> list[float | str]:
    """Applies the reward function at a place of the spec in a worker; returns as `Reward.apply`."""
    return _terms(spec)[index].apply(completions, examples)


@functools.cache
def _terms(spec: Spec) -> list[Reward]:
    return load_rewards(spec.paths, spec.weights, timeout=spec.timeout, key=spec.key)
