"""Samples and scores for many weights on one base: adapters stay beside the frozen matrices."""

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl.data import Tokenizer
from jaxrl.models import Params, lora
from jaxrl.sampling import Completion, EmbeddedSampler, OwnTurn, SamplingParams, StopTexts, Turn
from jaxrl.service.files import Saved
from jaxrl.service.pool import Base
from jaxrl.service.processes import Processes, everywhere
from jaxrl.service.scoring import Asked, Scorer, Scores, Top
from jaxrl.service.stacks import to_host
from jaxrl.sharding import Layout

BASE = ""
"""Name of the base model's own weights."""

TOGETHER = 16
"""The most adapters in one batch of samples: each costs all its tokens a product."""

_KEPT = 16  # adapters on the devices; others are read again from their checkpoint


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


class Backend(Protocol):
    """A sampler that serves weights with all parameters, and adapters beside the base's.

    Attributes:
      remote: True if it samples elsewhere than on the service's devices. Process 0 alone then has
        it, and `load` takes weights from the host.
    """

    remote: bool

    def load(self, weights: Any) -> None:
        """Serves these weights from now on."""
        ...

    def draw(
        self, turns: Sequence[OwnTurn], adapters: Mapping[str, Params]
    ) -> Iterator[tuple[int, Completion]]:
        """Yields the place of a turn and its completion, as they finish. Turns name adapters by
        their order."""
        ...


class Embedded:
    """The embedded sampler as a `Backend`."""

    remote = False

    def __init__(self, base: Base, *, max_batch: int, layout: Layout | None = None) -> None:
        """Makes the sampler: `max_batch` samples at once, on the devices of `layout`, if there are
        several."""
        settings: dict[str, Any] = {"precision": base.precision, "max_batch": max_batch}
        model = base.model
        if layout is not None:
            model, settings["layout"] = model._replace(local=layout.local), layout
        self.sampler = EmbeddedSampler(model, base.params, **settings)

    def load(self, weights: Any) -> None:
        """See `Backend.load`."""
        self.sampler.load(weights, version=0)

    def draw(
        self, turns: Sequence[OwnTurn], adapters: Mapping[str, Params]
    ) -> Iterator[tuple[int, Completion]]:
        """See `Backend.draw`."""
        yield from self.sampler.sample_own(turns, list(adapters.values()))


class Elsewhere:
    """The `Backend` of processes other than 0, if process 0 has servers."""

    remote = True

    def load(self, weights: Any) -> None:
        """Raises RuntimeError."""
        raise RuntimeError("only process 0 talks to the servers")

    def draw(
        self, turns: Sequence[OwnTurn], adapters: Mapping[str, Params]
    ) -> Iterator[tuple[int, Completion]]:
        """Raises RuntimeError."""
        raise RuntimeError("only process 0 samples from the servers")


class Samplers:
    """Weights and the sampler that serves them. A batch mixes adapters of one base, and settings of
    any kind; weights with all parameters have a batch of their own."""

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
        several = [one for one in self._loaded if one != self._whole]
        for old in several[: max(0, len(several) - _KEPT)]:
            del self._loaded[old]

    def answers(
        self, requests: Sequence[Request], saved: Mapping[str, Saved] = MappingProxyType({})
    ) -> Iterator[tuple[int, Answer]]:
        """Answers requests that may be in one batch, see `Request.whole`; yields the place of each
        with its answer, as soon as it has all its samples. `saved` has the weights that are not
        kept."""
        if not requests:
            return
        whole = requests[0].whole
        names = [*dict.fromkeys(one.weights for one in requests if one.weights != BASE)]
        self._bring(names, {name: saved[name] for name in names if not self.keeps(name)})
        adapters = [] if whole else names
        owners, turns = list[int](), list[OwnTurn]()
        for place, one in enumerate(requests):
            params = self._params(one)
            mine = adapters.index(one.weights) if one.weights in adapters else None
            for sample in range(one.count):
                turn = Turn(one.prompt, _index(one.seed), sample, one.max_tokens)
                turns.append(OwnTurn(turn, params, mine))
                owners.append(place)
        found: list[list[Completion]] = [[] for _ in requests]
        draw = self._draw if self._backend.remote else self._draw_everywhere
        for number, completion in draw(turns, adapters, whole):
            place = owners[number]
            one, samples = requests[place], found[place]
            samples.append(completion)
            if len(samples) < one.count:
                continue
            samples.sort(key=lambda c: c.sample_index)
            yield place, self._answer(one, samples)

    @everywhere
    def _bring(self, names: Sequence[str], missing: Mapping[str, Saved]) -> None:
        """Brings weights to the devices; those with these names are not removed for it."""
        for name in names:
            if name not in missing:
                self._loaded.move_to_end(name)
        for name, saved in missing.items():
            self.keep(name, self._load(saved))

    @everywhere
    def _draw_everywhere(
        self, turns: Sequence[OwnTurn], adapters: Sequence[str], whole: str
    ) -> Iterator[tuple[int, Completion]]:
        return self._draw(turns, adapters, whole)

    def _draw(
        self, turns: Sequence[OwnTurn], adapters: Sequence[str], whole: str
    ) -> Iterator[tuple[int, Completion]]:
        """Draws from adapters beside the base, or from weights with all parameters, `whole`."""
        served = self._served(whole)
        try:
            if served is not self._serving:
                self._backend.load(self._on_host(whole) if self._backend.remote else served)
                self._serving = served
            yield from self._backend.draw(turns, {name: self._loaded[name] for name in adapters})
        except Exception:
            self._serving = None  # a server may have restarted
            raise

    @everywhere
    def _on_host(self, whole: str) -> Any:
        """Returns weights with all parameters; with several processes on the host of process 0."""
        served, processes = self._served(whole), self.processes
        return to_host(served, keep=processes.hosts.leads) if processes.several else served

    @everywhere
    def _score(self, name: str, whole: str, tokens: np.ndarray, asked: Asked) -> Scores:
        weights = self._served(whole)
        if not whole and name != BASE:
            weights = lora.declared(lora.Adapted(self._loaded[name], weights, 1.0))
        return self._scorer.score(weights, tokens, asked)

    def _served(self, whole: str) -> Any:
        """Returns the weights that adapters are beside, the base's or those named `whole`."""
        return self._loaded[whole] if whole else self._base.params

    def _answer(self, one: Request, samples: Sequence[Completion]) -> Answer:
        """Adds the scores that a request asks for."""
        score = functools.partial(self._score, one.weights, one.whole)
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
