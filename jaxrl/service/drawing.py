"""Requests for samples that are being drawn, which others join."""

import time
from collections.abc import Callable, Sequence

from jaxrl.service.checkpoints import Checkpoints
from jaxrl.service.requests import Work
from jaxrl.service.sampling import Answer, Request, Samplers
from jaxrl.service.wire import RefusedError


class Drawing:
    """The requests that are being drawn."""

    def __init__(
        self,
        samplers: Samplers,
        checkpoints: Checkpoints,
        *,
        present: Callable[[Request], Request],
        answer: Callable[[Work, Answer], None],
        fail: Callable[[Work, Exception], None],
    ) -> None:
        """Makes it without requests.

        Args:
          samplers: draw the samples.
          checkpoints: have the weights that the samplers do not keep.
          present: names the weights of a request that asks for a model's present ones; raises
            RefusedError if they are no longer there.
          answer: is called with a request that has all its samples.
          fail: is called with one that is refused.
        """
        self._samplers, self._checkpoints, self._present = samplers, checkpoints, present
        self._answer, self._fail, self._works = answer, fail, dict[str, Work]()
        self._began = 0.0
        self.took = 0.0
        """Seconds from the first request to the end of the last one."""

    @property
    def begun(self) -> list[Request]:
        """The requests in progress."""
        return [work.payload for work in self._works.values()]

    def join(self, works: Sequence[Work]) -> None:
        """Adds requests, which may be drawn together with those in progress."""
        requests, ready = dict[str, Request](), dict[str, Work]()
        for work in works:
            try:
                found = requests[work.id] = self._present(work.payload)
                # Later ones that ask for the same model's present weights may join it.
                ready[work.id] = work._replace(payload=found._replace(whole=work.payload.whole))
            except RefusedError as error:
                self._fail(work, error)
        if not requests:
            return
        missing = {x.weights for x in requests.values() if not self._samplers.keeps(x.weights)}
        self._began = self._began if self._works else time.monotonic()
        self._samplers.add(requests, {path: self._checkpoints.saved(path) for path in missing})
        self._works |= ready

    def advance(self, *, wait: bool = True) -> None:
        """Draws for a moment, and answers the requests that are complete. Without `wait` it does
        not wait for servers, if they draw."""
        for name, answer in self._samplers.advance(wait=wait):
            self._answer(self._works[name], answer)
            del self._works[name]
            self.took = time.monotonic() - self._began

    def alone(self, works: Sequence[Work]) -> None:
        """Draws requests to their end; none joins them."""
        try:
            self.join(works)
            while self._works:
                self.advance()
        finally:
            self.forget()

    def forget(self) -> list[Work]:
        """Returns the requests in progress, which are no longer drawn."""
        works = [*self._works.values()]
        self._works.clear()
        self._samplers.drop()
        return works
