"""Samples and scores for many weights on one base: adapters stay beside the frozen matrices."""

import functools
import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data import Tokenizer
from jaxrl.models import Params, lora
from jaxrl.sampling import Completion, OwnTurn, SamplingParams, StopTexts, Turn
from jaxrl.service.backends import Backend
from jaxrl.service.files import Saved
from jaxrl.service.pool import Base
from jaxrl.service.processes import Processes, everywhere
from jaxrl.service.scoring import Asked, Scorer, Scores, Top
from jaxrl.service.stacks import to_host

BASE = ""
"""Name of the base model's own weights."""

TOGETHER = 16
"""The most adapters that requests in progress name."""

_KEPT = 16  # further adapters on the devices; others are read again from their checkpoint
# Tokens of each sample until the next look at what has come: few at first and after a request has
# joined, then more, up to so many and for about so many seconds. A look costs about a token.
_FEW, _MOST, _LOOK = 4, 64, 2.0


class Request(NamedTuple):
    """A request for samples of one prompt.

    Attributes:
      weights: name of the weights, `BASE` for the base model's.
      prompt: i32[P].
      count: number of samples.
      max_tokens: their maximum length, within the model's positions.
      stop: the ids of tokens that end one, or texts; None for the model's own end tokens.
      seed: samples are a function of weights, prompt, settings and seed.
      prompt_logprobs: whether the prompt's tokens are scored.
      last: the number of its last tokens that are; None for all.
      asked: further scores of the prompt.
      sparse: row pointers and columns, if the targets of `asked` were sent as a sparse array.
      top: number of most probable tokens to name at each position of the samples.
      ends: whether the model's own end tokens also end a sample that has a `stop`.
      whole: `weights`, if they are all parameters instead of adapters to the base, or adapters that
        are merged for fixed sums: requests of one batch have this in common.
    """

    weights: str
    prompt: np.ndarray
    count: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[int, ...] | tuple[str, ...] | None
    seed: int
    prompt_logprobs: bool = False
    last: int | None = None
    asked: Asked = Asked()
    sparse: tuple[Sequence[int], Sequence[int]] | None = None
    top: int = 0
    whole: str = ""
    ends: bool = False


class Answer(NamedTuple):
    """The samples of a request, and the scores of its prompt.

    Attributes:
      samples: in the order of their indices.
      scores: of the prompt's tokens; None if nothing of it was asked for.
      top: of each sample, the most probable tokens at its positions; empty if not asked for.
      weights: their name; of a model's present ones `MODEL@N` after its request N.
    """

    samples: Sequence[Completion]
    scores: Scores | None
    top: Sequence[Top] = ()
    weights: str = BASE


class _Drawn(NamedTuple):
    """A request in progress."""

    request: Request
    adapters: int | None  # place of its adapters; None without any
    samples: list[Completion]


class Samplers:
    """Weights and the sampler that serves them. Requests join those that are being drawn, whatever
    their adapters of one base and their settings; weights with all parameters are drawn from
    alone."""

    def __init__(
        self,
        base: Base,
        *,
        tokenizer: Tokenizer,
        end_ids: Sequence[int],
        load: Callable[[Saved], Any],
        backend: Backend,
        processes: Processes | None = None,
    ) -> None:
        """Serves the base.

        Args:
          base: the model.
          tokenizer: the model's, for texts that end a sample.
          end_ids: tokens that end a sample if the request names none.
          load: reads weights, `lora.Adapted` or plain, in `precision.wire`.
          backend: draws the samples; it has the base's weights.
          processes: those of the service; by default this one.
        """
        self._base, self._tokenizer, self._end_ids = base, tokenizer, tuple(end_ids)
        self._load, self._loaded, self._whole = load, OrderedDict[str, Any](), ""
        self._texts = functools.lru_cache(maxsize=64)(functools.partial(StopTexts, tokenizer))
        self._backend, self.processes = backend, processes or Processes()
        self._serving: Any = base.params
        self._scorer = Scorer(base)
        self._drawn, self._owners = dict[str, _Drawn](), dict[int, str]()
        self._adapters: list[tuple[str, Params]] = []  # those that requests in progress may name
        self._most = _FEW

    @property
    def remote(self) -> bool:
        """True if servers draw the samples."""
        return self._backend.remote

    def keeps(self, name: str) -> bool:
        """Tells whether weights are on the devices."""
        return name == BASE or name in self._loaded

    def keep(self, name: str, weights: Any) -> None:
        """Keeps weights on the devices, so that the next request need not load them."""
        adapted = isinstance(weights, lora.Adapted)
        self._loaded[name] = lora.scaled(weights) if adapted else weights
        self._loaded.move_to_end(name)
        if not adapted and name != self._whole:  # one at a time
            self._loaded.pop(self._whole, None)
            self._whole = name
        named = {one for one, _ in self._adapters}
        several = [one for one in self._loaded if one != self._whole and one not in named]
        for old in several[: max(0, len(several) - _KEPT)]:
            del self._loaded[old]

    def add(
        self, requests: Mapping[str, Request], saved: Mapping[str, Saved] = MappingProxyType({})
    ) -> None:
        """Adds requests, by ids of theirs, that may be drawn together with those in progress, see
        `Request.whole`. `saved` has the weights that are not kept."""
        whole = next(iter(requests.values())).whole
        names = dict.fromkeys(x.weights for x in requests.values() if x.weights != BASE)
        self._bring([*names], {name: saved[name] for name in names if not self.keeps(name)})
        if not self._drawn:
            self._begin(whole)
        places = dict[str, int]() if whole else self._places([*names])
        owners, turns = list[str](), list[OwnTurn]()
        for key, one in requests.items():
            params = self._params(one)
            for sample in range(one.count):
                turn = Turn(one.prompt, _index(one.seed), sample, one.max_tokens)
                turns.append(OwnTurn(turn, params, places.get(one.weights)))
                owners.append(key)
        used = [one.adapters for one in self._drawn.values()]
        count = max((x for x in (*used, *places.values()) if x is not None), default=-1) + 1
        self._name(places, count=count)
        first = self._backend.add(turns, self._adapters) if self.remote else self._add(turns)
        self._owners |= dict(enumerate(owners, first))
        for key, one in requests.items():
            self._drawn[key] = _Drawn(one, places.get(one.weights), [])
        self._most = _FEW

    def advance(self, *, wait: bool = True) -> Iterator[tuple[str, Answer]]:
        """Goes on with the requests in progress for a moment, or waits for servers if it is to
        `wait`; yields the ids and answers of those that have all their samples now."""
        began = time.monotonic()
        ended = self._backend.advance(int(wait)) if self.remote else self._advance(self._most)
        took = time.monotonic() - began
        if took > _LOOK:
            self._most = max(1, self._most // 2)
        elif took < _LOOK / 2:
            self._most = min(2 * self._most, _MOST)
        whole = list[str]()
        for number, completion in ended:
            key = self._owners.pop(number)
            one = self._drawn[key]
            one.samples.append(completion)
            if len(one.samples) == one.request.count:
                whole.append(key)
        for key in whole:
            yield key, self._answer(self._drawn[key])
            del self._drawn[key]

    def drop(self) -> None:
        """Forgets the requests in progress, after an error."""
        self._drawn.clear()
        self._owners.clear()
        self._serving = None  # a server may have restarted
        if self.remote:
            self._backend.drop()
        else:
            self._drop_everywhere()

    def _places(self, names: Sequence[str]) -> dict[str, int]:
        """Returns a place among the adapters of requests in progress for each of these: the one
        that it has, or one that no request needs any more."""
        found, used = dict[str, int](), {one.adapters for one in self._drawn.values()}
        known = {id(one): place for place, (_, one) in enumerate(self._adapters)}
        for name in names:
            if (place := known.get(id(self._loaded[name]))) is not None:
                found[name] = place
        used |= {*found.values()}
        free = (place for place in itertools.count() if place not in used)
        return found | {name: next(free) for name in names if name not in found}

    @everywhere
    def _bring(self, names: Sequence[str], missing: Mapping[str, Saved]) -> None:
        """Brings weights to the devices; those with these names are not removed for it."""
        for name in names:
            if name not in missing:
                self._loaded.move_to_end(name)
        for name, saved in missing.items():
            self.keep(name, self._load(saved))

    def _begin(self, whole: str) -> None:
        """Serves the base, or weights with all parameters, `whole`; no request is in progress."""
        if not self.remote:
            return self._begin_everywhere(whole)
        if (served := self._served(whole)) is not self._serving:
            self._serving = None  # if it fails
            self._backend.load(self._on_host(whole))
            self._serving = served

    @everywhere
    def _begin_everywhere(self, whole: str) -> None:
        if (served := self._served(whole)) is not self._serving:
            self._serving = None
            self._backend.load(served)
            self._serving = served

    @everywhere
    def _name(self, places: Mapping[str, int], *, count: int) -> None:
        """Gives adapters their places; those from `count` on are needed no more."""
        for name, place in sorted(places.items(), key=lambda item: item[1]):
            self._adapters[place : place + 1] = [(name, self._loaded[name])]
        del self._adapters[count:]

    @everywhere
    def _add(self, turns: Sequence[OwnTurn]) -> int:
        return self._backend.add(turns, self._adapters)

    @everywhere
    def _advance(self, most: int) -> list[tuple[int, Completion]]:
        return self._backend.advance(most)

    @everywhere
    def _drop_everywhere(self) -> None:
        self._serving = None
        self._backend.drop()

    @everywhere
    def _on_host(self, whole: str) -> Any:
        """Returns weights with all parameters; with several processes on the host of process 0."""
        served, processes = self._served(whole), self.processes
        return to_host(served, keep=processes.hosts.leads) if processes.several else served

    @everywhere
    def _score(self, adapters: int | None, whole: str, tokens: np.ndarray, asked: Asked) -> Scores:
        weights = self._served(whole)
        if adapters is not None:
            weights = lora.declared(lora.Adapted(self._adapters[adapters][1], weights, 1.0))
        return self._scorer.score(weights, tokens, asked)

    def _served(self, whole: str) -> Any:
        """Returns the weights that adapters are beside, the base's or those named `whole`."""
        return self._loaded[whole] if whole else self._base.params

    def _answer(self, drawn: _Drawn) -> Answer:
        """Adds the scores that a request asks for."""
        one = drawn.request
        samples = sorted(drawn.samples, key=lambda c: c.sample_index)
        score = functools.partial(self._score, drawn.adapters, one.whole)
        scores, top = None, list[Top]()
        if one.prompt_logprobs or one.asked.wanted:
            scores = score(one.prompt, one.asked)
            if one.last is not None:
                scores = scores.of_last(one.last)
        for sample in samples if one.top else ():
            whole = np.concatenate([one.prompt, sample.tokens])
            found = score(whole, Asked(one.top)).top
            assert found is not None
            ids, values = found
            top.append((ids[len(one.prompt) :], values[len(one.prompt) :]))
        return Answer(samples, scores, top, one.weights)

    def _params(self, request: Request) -> SamplingParams:
        stop, texts = request.stop, None
        ends: tuple[int, ...] = self._end_ids if stop is None or request.ends else ()
        if stop and isinstance(stop[0], str):
            texts = self._texts(stop)
        elif stop:
            ends += tuple(int(token) for token in stop)
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            stop=tuple((end,) for end in ends),
            stop_texts=texts,
        )


def _index(seed: int) -> int:
    """Maps a seed to the index that the sampler draws random numbers from."""
    if 0 <= seed < 2**31:
        return seed
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4]) >> 1
