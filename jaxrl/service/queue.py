"""The order of work: each model's requests by sequence number, several models' in one batch."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from jaxrl.service.requests import Work
from jaxrl.service.sampling import TOGETHER, Request
from jaxrl.service.wire import Batch

# The first requests for samples wait until none has come for this time: in seconds, or as a share
# of the time that the last ones took to be drawn.
_SETTLES, _SHARE, _MOST = 0.03, 0.05, 0.3
_LONGEST = 10  # such times that one request waits for others


class _Line:
    """Requests of one model. Later ones may arrive first."""

    def __init__(self, begin: int, *, passed: set[int]) -> None:
        self.next, self.waiting, self.passed = begin, dict[int, Work](), passed
        self.skip()

    def skip(self) -> None:
        while self.next in self.passed:
            self.passed.remove(self.next)
            self.next += 1


class Queue:
    """Accepted requests. Handlers of requests add to it; the engine's thread takes from it."""

    def __init__(self, *, kind_of: Callable[[str], Hashable], models: int) -> None:
        """Makes an empty queue; `kind_of` maps a model to what it shares programs with. Training
        requests of at most `models` are computed together."""
        self._kind_of, self._models = kind_of, models
        self._ready = threading.Condition()
        self._lines = OrderedDict[str, _Line]()
        self._samples = OrderedDict[str, Work]()
        self._first, self._last = 0.0, 0.0  # times at which those that wait have come
        self._closed = False

    def open(self, model: str, *, begin: int = 0, passed: set[int] | None = None) -> None:
        """Adds a model's line, unless it exists. `passed` are sequence numbers of requests that
        need no turn."""
        with self._ready:
            if model not in self._lines:
                self._lines[model] = _Line(begin, passed=passed or set())

    def known(self, model: str) -> bool:
        """Tells whether a model has a line."""
        with self._ready:
            return model in self._lines

    def add(self, work: Work) -> None:
        """Adds a request."""
        with self._ready:
            if work.kind == "sample":
                self._last = time.monotonic()
                self._first = self._first if self._samples else self._last
                self._samples[work.id] = work
            else:
                self._lines[work.target].waiting[work.seq] = work
            self._ready.notify()

    def drop(self, model: str, seq: int) -> None:
        """Lets the requests after one that was refused have their turn."""
        with self._ready:
            line = self._lines[model]
            line.passed.add(seq)
            line.skip()
            self._ready.notify()

    def cancel(self, request: str) -> Work | None:
        """Removes a request for samples that has not begun."""
        with self._ready:
            return self._samples.pop(request, None)

    def close(self) -> None:
        """Ends `take`."""
        with self._ready:
            self._closed = True
            self._ready.notify()

    def take(
        self, *, most: int, begun: Sequence[Request] = (), train: bool = True, drawn: float = 0.0
    ) -> tuple[list[Work], list[Work]] | None:
        """Waits for work. Returns training requests to compute together and requests for samples
        to draw together, at most `most` samples unless one alone asks for more; None at the end.

        A client sends requests for samples one by one, and they are drawn faster if they begin
        together; so the first ones wait a moment for others.

        Args:
          most: the most samples.
          begun: requests that are being drawn. With some it does not wait, and the requests for
            samples are those that may join them: in the order in which they came, so that each has
            its turn.
          train: False for no training requests beside those that are being drawn.
          drawn: the seconds that the last samples took.
        """
        settles = max(_SETTLES, min(_SHARE * drawn, _MOST))
        with self._ready:
            while not self._closed:
                if begun:
                    return self._beside(begun, most, train=train)
                training, wait = self._training(), self._unsettled(most, settles)
                samples = [] if wait and not training else self._sampling(most)
                if training or samples:
                    return training, samples
                self._ready.wait(wait or None)
            return None

    def _beside(
        self, begun: Sequence[Request], most: int, *, train: bool
    ) -> tuple[list[Work], list[Work]]:
        """Returns what may be done while requests are being drawn. With all parameters of another
        model than the base on the devices, training waits for their end, and none joins them."""
        if begun[0].whole:
            trains = any(line.next in line.waiting for line in self._lines.values())
            return [], [] if trains else self._sampling(most, begun)
        return self._training() if train else [], self._sampling(most, begun)

    def _unsettled(self, most: int, settles: float) -> float:
        """Returns the seconds for which more requests for samples may be about to come; 0 if none
        came for `settles`, or if those that wait fill a batch."""
        if not self._samples or sum(w.payload.count for w in self._samples.values()) >= most:
            return 0.0
        until = min(self._last + settles, self._first + _LONGEST * settles)
        return max(0.0, until - time.monotonic())

    def _training(self) -> list[Work]:
        heads = {name: line for name, line in self._lines.items() if line.next in line.waiting}
        if not heads:
            return []
        name, line = next(iter(heads.items()))
        self._lines.move_to_end(name)  # others come first next time
        first = line.waiting[line.next]
        if first.kind != "compute":
            return [self._pop(line)]
        key, taken, models = self._key(first), list[Work](), 0
        for line in heads.values():
            before = len(taken)
            while (work := line.waiting.get(line.next)) and self._key(work) == key:
                taken.append(self._pop(line))
            models += len(taken) > before
            if models == self._models:
                break
        return taken

    def _pop(self, line: _Line) -> Work:
        work = line.waiting.pop(line.next)
        line.next += 1
        line.skip()
        return work

    def _key(self, work: Work) -> Hashable:
        """Returns what requests of one batch share; None for requests that are done alone."""
        batch = work.payload
        if not isinstance(batch, Batch):
            return None
        shapes = {(one.targets.shape[1], tuple(sorted(one.arrays))) for one in batch.data}
        how = batch.loss, batch.forward_only, batch.shadow
        return self._kind_of(work.target), how, frozenset(shapes)

    def _sampling(self, most: int, begun: Sequence[Request] = ()) -> list[Work]:
        """Takes requests for samples; beside some that have begun, none that came after one which
        may not join them."""
        taken, weights = list[Work](), {one.weights for one in begun}
        count = sum(one.count for one in begun)
        whole = begun[0].whole if begun else None
        for work in list(self._samples.values()):
            one: Request = work.payload
            whole = one.whole if whole is None else whole
            room = not count or count + one.count <= most
            if one.whole == whole and room and len(weights | {one.weights}) <= TOGETHER:
                weights.add(one.weights)
                count += one.count
                taken.append(self._samples.pop(work.id))
            elif begun:
                break
        return taken
