"""A client of one or many vLLM servers: token ids in; token ids, log-probs and versions out.

It uses `/inference/v1/generate`, the only endpoint that reports which weights sampled each token. A
prompt's group is one request, so the server prefills the prompt once. Later turns of an episode go
to the server that holds its prefix.
"""

import base64
import functools
import io
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from typing import Any, NamedTuple

import numpy as np

from jaxrl.sampling.base import (
    Completion,
    Sampler,
    SamplingParams,
    Turn,
    check_recorded,
    check_turns,
)
from jaxrl.sampling.vllm.kept import read_kept
from jaxrl.sampling.vllm.logprobs import VllmScorer, valid_logprob
from jaxrl.sampling.vllm.router import GENERATE, SamplerError, UnpublishedWeightsError


class Served(NamedTuple):
    """A published version of the servers' weights, or of an adapter to them."""

    version: int
    adapter: str | None = None
    session: str = ""  # of the learner that published it


class _Partial(NamedTuple):
    """The part of a completion that an aborted request has returned."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    experts: np.ndarray | None = None
    kept: np.ndarray | None = None


class HttpRequest(NamedTuple):
    """One HTTP request: for completions of turns with equal contexts, or to continue one."""

    turns: Sequence[Turn]
    seed: int
    served: Served
    params: SamplingParams
    partial: _Partial = _Partial([], [], [])


class VllmSampler(VllmScorer, Sampler):
    """Samples from vLLM servers.

    Completions are reproducible if the server's numerics do not depend on its load: a retry sends
    the same token ids and seed. Each completion is yielded once. Log-probs that the server omits,
    or that are NaN or positive, are NaN. Servers score with the version that was published last.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_positions: int,
        vocab_size: int,
        max_requests: int = 32,
        timeout: float = 600.0,
        headers: Mapping[str, str] | None = None,
        routed_layers: int = 0,
        record_kept: bool = False,
    ) -> None:
        """Makes the client as `VllmScorer` does. Completions record the experts of the model's last
        `routed_layers` layers, and with `record_kept` the tokens that truncated sampling kept,
        which the servers must then report."""
        super().__init__(
            urls,
            max_positions=max_positions,
            vocab_size=vocab_size,
            max_requests=max_requests,
            timeout=timeout,
            headers=headers,
        )
        self._routed_layers, self.records_kept = routed_layers, record_kept
        self._served = Served(0)
        self._used: dict[str, Any] = {"version": 0, "urls": list(urls)}

    @property
    def used(self) -> dict[str, Any]:
        """The last arguments of `use_version`, for another client of the same servers."""
        return self._used

    @property
    def version(self) -> int:
        """The policy version that was published last."""
        return self._served.version

    def use_version(
        self,
        version: int,
        *,
        urls: Sequence[str],
        left: Collection[str] = (),
        adapter: str | None = None,
        session: str = "",
    ) -> None:
        """Samples from a policy version from now on, at the servers that serve it; failed servers
        among them get requests again, and new ones their first. Requests in flight at others are
        sent again, but servers that have `left` finish theirs. With an adapter, `version` is the
        adapter's.

        If a session is given, weights published by another session's learner are refused. Raises
        ValueError for an address that is not http://."""
        self._make_room(len(urls))
        self._router.use(urls, left=left)
        given = {"urls": urls, "left": left, "adapter": adapter, "session": session}
        self._used = {"version": version} | given
        self._served = Served(version, adapter, session)

    def limit(self, max_requests: int) -> None:
        """Sends at most so many requests to each server at the same time from now on; no more than
        the client was made for."""
        self._router.limit(max_requests)

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`. Consecutive turns with the same context are one request.

        Raises:
          SamplerError: while iterating, if a server does not answer after several attempts or
            refuses a request. Completions that were yielded before stay valid.
        """
        turns = check_turns(turns, max_positions=self._max_positions, vocab_size=self._vocab_size)
        if self.records_kept:
            check_recorded(params, self._vocab_size)
        groups: list[list[Turn]] = []
        for turn in turns:
            # vLLM refuses several greedy completions in one request.
            if params.temperature > 0 and groups and _follows(turn, groups[-1][-1]):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        served = self._served
        most = max((turn.prompt_index for turn in turns), default=-1) + 1
        seeds = np.random.SeedSequence(params.seed).generate_state(most, np.uint64) >> 2
        requests = [HttpRequest(g, int(seeds[g[0].prompt_index]), served, params) for g in groups]
        return self._completions(requests)

    def _completions(self, requests: Sequence[HttpRequest]) -> Iterator[Completion]:
        futures = [self._pools[-1].submit(self._complete, one) for one in requests]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            for future in futures:
                future.cancel()

    def _complete(self, request: HttpRequest) -> list[Completion]:
        """Returns the completions of one request, continuing those that a publish aborted."""
        done: list[Completion] = []
        todo = [request]
        while todo:
            one = todo.pop()
            for turn, choice in zip(one.turns, self._generate(one), strict=True):
                partial = _parse_choice(choice, one)
                if layers := self._routed_layers:
                    tokens = len(turn.context) + len(partial.tokens)
                    before = one.partial.experts
                    experts = _read_experts(choice, before, tokens=tokens, layers=layers)
                    partial = partial._replace(experts=experts)
                if self.records_kept:
                    partial = _with_kept(partial, choice, one, vocab_size=self._vocab_size)
                reason, end = choice["finish_reason"], find_end(partial.tokens, one.params)
                if reason == "abort" and end is None:
                    todo.append(one._replace(turns=[turn], partial=partial))
                else:
                    done.append(_completion(turn, partial, reason=reason, end=end))
        return done

    def _generate(self, request: HttpRequest) -> list[dict[str, Any]]:
        tokens = request.turns[0].context.tolist() + request.partial.tokens
        settings = sampling_settings(request)
        if self.records_kept and request.params.temperature == 0:
            # vLLM's record needs a positive temperature and a top_k.
            settings |= {"temperature": 1.0, "top_k": 1}
        asked = {"token_ids": tokens, "sampling_params": settings}
        return self._post(request, asked | _model(request.served))

    def _post(
        self, request: HttpRequest, asked: dict[str, Any], *, path: str = GENERATE
    ) -> list[dict[str, Any]]:
        first = request.turns[0]
        prompt_hash = hash(first.context[: first.prompt_length].tobytes())
        try:
            return self._router.post(
                asked,
                path=path,
                read=lambda text: self._read(text, request),
                about=f"prompt {first.prompt_index}",
                # The server of an episode's last turn has the episode in its prefix cache.
                keys=[(prompt_hash, turn.sample_index) for turn in request.turns],
            )
        except SamplerError as error:
            if error.status != 404 or (adapter := request.served.adapter) is None:
                raise
            raise UnpublishedWeightsError(
                f"the server no longer has adapter {adapter!r}: it has restarted, or was given the "
                f"weights of another learner ({error})"
            ) from error

    def _read(self, text: str, request: HttpRequest) -> list[dict[str, Any]]:
        choices = self._checked(json.loads(text)["choices"], request)
        for span in (span for c in choices for span in c.get("weight_versions") or ()):
            _parse_version(span["version"], request.served)
        return choices

    def _checked(self, choices: list[dict[str, Any]], request: HttpRequest) -> list[dict[str, Any]]:
        """Returns the choices in their order; raises SamplerError unless each turn has one."""
        if len(choices) != len(request.turns):
            raise SamplerError(
                f"prompt {request.turns[0].prompt_index}: requested {len(request.turns)} "
                f"completions, received {len(choices)}"
            )
        return sorted(choices, key=lambda choice: choice["index"])

    def _score(self, turn: Turn) -> np.ndarray:
        served = self._served
        check = functools.partial(_check_scored, served=served)
        return self._logprobs(turn, check=check, model=_model(served))


def _follows(turn: Turn, before: Turn) -> bool:
    """Returns True if a turn is the next completion of the same context."""
    same = (turn.prompt_index, turn.max_tokens) == (before.prompt_index, before.max_tokens)
    next_ = turn.sample_index == before.sample_index + 1
    return same and next_ and np.array_equal(turn.context, before.context)


def sampling_settings(request: HttpRequest) -> dict[str, Any]:
    """Returns vLLM's sampling parameters of a request."""
    first, done, params = request.turns[0], request.partial.tokens, request.params
    return {
        "n": len(request.turns),
        "max_tokens": first.max_tokens - len(done),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        # A continuation needs another seed, or it would draw the same random numbers again.
        "seed": request.seed + first.sample_index + len(done),
        "logprobs": 0,  # of the token itself and no other
        **stop_settings(params),
    }


def stop_settings(params: SamplingParams) -> dict[str, Any]:
    """Returns the part of vLLM's sampling parameters that ends completions."""
    texts = [] if params.stop_texts is None else list(params.stop_texts.texts)
    return {
        # vLLM ends a request at a text. A text that begins before an abort and ends after it is
        # found by `find_end` alone, and so are stop sequences of several tokens.
        "detokenize": bool(texts),
        "stop": texts,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        # Only `params` ends a completion, whatever the server's own configuration says.
        "ignore_eos": True,
        "stop_token_ids": [stop[0] for stop in params.stop if len(stop) == 1],
    }


def _model(served: Served) -> dict[str, str]:
    return {} if served.adapter is None else {"model": served.adapter}


def _parse_version(label: str, served: Served) -> int:
    """Returns the policy version of weights with the label "version@session"."""
    version, _, session = label.partition("@")
    if not (version.isascii() and version.isdigit()):
        raise UnpublishedWeightsError(
            f"the server samples from weights {label!r}, which no learner has published"
        )
    if served.session not in ("", session):
        raise UnpublishedWeightsError(
            f"the server samples from weights {label!r} of another learner; labels of this run end "
            f"with @{served.session}"
        )
    return int(version)


def _check_scored(label: str, *, served: Served) -> None:
    # The label is the version of the weights, which differs from an adapter's version.
    version = _parse_version(label, served)
    if version != served.version and served.adapter is None:
        raise SamplerError(
            f"the server scores with weights {label!r}, but version {served.version} was "
            "published last: the weights changed during the request"
        )


def _parse_choice(choice: dict[str, Any], request: HttpRequest) -> _Partial:
    """Appends a choice to the completion that it continues."""
    tokens = choice["token_ids"] or []
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [valid_logprob(item.get("logprob")) for item in content[: len(tokens)]]
    logprobs += [math.nan] * (len(tokens) - len(logprobs))
    versions = [0] * len(tokens)
    for span in choice.get("weight_versions") or ():
        version = _parse_version(span["version"], request.served)
        versions[span["start"] : span["end"]] = [version] * (span["end"] - span["start"])
    if request.served.adapter is not None:
        versions = [request.served.version] * len(tokens)
    before = request.partial
    return _Partial(before.tokens + tokens, before.logprobs + logprobs, before.versions + versions)


def _with_kept(
    whole: _Partial, choice: dict[str, Any], request: HttpRequest, *, vocab_size: int
) -> _Partial:
    """Adds the records of a choice's tokens, which are the last of `whole`."""
    before = request.partial
    done = len(before.tokens)
    kept, logprobs = read_kept(choice, whole.logprobs[done:], request.params, vocab_size=vocab_size)
    if kept is not None and before.kept is not None:
        kept = np.concatenate([before.kept, kept])
    return whole._replace(kept=kept, logprobs=before.logprobs + logprobs)


def _read_experts(
    choice: Mapping[str, Any], before: np.ndarray | None, *, tokens: int, layers: int
) -> np.ndarray | None:
    """Reads the experts of a choice whose prompt and completion have `tokens` token ids, in the
    last `layers` of the model; the server also reports the first ones, which may be dense.

    `routed_experts` is base64 of a .npy file, [tokens - 1, L, k] unsigned: the last token was never
    run through the model. `before`, the experts of the part that the choice continues, are kept:
    that part was sampled with them, but has been recomputed with newer weights. Returns None if
    nothing was run.

    Raises:
      SamplerError: if the server did not record the experts of all tokens.
    """
    text = choice.get("routed_experts")
    if text is None and not choice["token_ids"]:
        return before
    if text is None:
        raise SamplerError(
            "the server reports no experts, which train.replay_routing needs: start it with "
            "--vllm_args '[\"--enable-return-routed-experts\"]' and VLLM_USE_V2_MODEL_RUNNER=1, or "
            "leave train.replay_routing out"
        )
    found = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if found.ndim != 3 or len(found) != tokens - 1 or found.shape[1] < layers:
        raise SamplerError(
            f"the server reports experts of shape {list(found.shape)} for {tokens} tokens; "
            f"expected [{tokens - 1}, layers, experts per token] with at least {layers} layers"
        )
    found = found[:, -layers:]
    return found if before is None else np.concatenate([before, found[len(before) :]])


def _completion(turn: Turn, whole: _Partial, *, reason: str, end: int | None) -> Completion:
    tokens, logprobs, versions = (part[:end] for part in whole[:3])
    computed = len(turn.context) + len(tokens) - 1
    return Completion(
        prompt_index=turn.prompt_index,
        sample_index=turn.sample_index,
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.asarray(versions, np.int32),
        finish_reason="length" if reason == "length" and end is None else "stop",
        experts=None if whole.experts is None else whole.experts[:computed],
        kept=None if whole.kept is None else whole.kept[:end],
    )


def find_end(tokens: Sequence[int], params: SamplingParams) -> int | None:
    """Returns the end of the first stop text or stop sequence of several tokens, or None."""
    ends = [
        i
        for sequence in params.stop
        if len(sequence) > 1
        for i in range(len(sequence), len(tokens) + 1)
        if tuple(tokens[i - len(sequence) : i]) == tuple(sequence)
    ]
    if params.stop_texts is not None and (end := params.stop_texts.end(tokens)) is not None:
        ends.append(end)
    return min(ends, default=None)
