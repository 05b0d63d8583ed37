"""Draws requests for samples to their end."""

from collections.abc import Iterator, Mapping, Sequence

from jaxrl.service.files import Saved
from jaxrl.service.sampling import Answer, Request, Samplers


def drawn(
    samplers: Samplers, requests: Sequence[Request], saved: Mapping[str, Saved] | None = None
) -> Iterator[tuple[int, Answer]]:
    """Yields the place of each request and its answer."""
    samplers.add({str(place): one for place, one in enumerate(requests)}, saved or {})
    left = len(requests)
    while left:
        for name, answer in samplers.advance():
            left -= 1
            yield int(name), answer
