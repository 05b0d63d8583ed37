"""A client of one or many vLLM servers: token ids in; token ids, log-probs and versions out.

Uses `/inference/v1/generate`, the one endpoint that reports which weights drew each token. A
prompt's group is one request, which computes the prompt once, and an episode stays where it was
begun.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np

from jaxrl.sampling.base import Completion, SamplingParams, Turn, check_request, check_turns
from jaxrl.sampling.vllm.router import Router, SamplerError, StrangerError

_PATH = "/inference/v1/generate"
_ROUNDING = 1e-4  # a log-prob above 0 by less is 0; by more it is no log-prob


class _Request(NamedTuple):
    """What one HTTP request asks for: `count` answers that begin with `begun`."""

    prompt_index: int
    first: int  # sample index of the first answer
    count: int
    prompt: list[int]
    max_tokens: int
    seed: int
    policy: "_Policy"
    opening: int  # stands for what its group began with
    begun: "_Draft | None" = None


class _Policy(NamedTuple):
    """What answers are drawn from: a version of the servers' weights, or of an adapter to them."""

    version: int
    adapter: str | None = None


class _Draft(NamedTuple):
    """An answer that an aborted request has begun."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


class VllmSampler:
    """A `Sampler` that asks vLLM servers.

    All answers of a seed are the same as long as the server's numerics do not depend on its load.
    Retrying sends the same token ids and the same seed; an answer is handed on once.
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
    ) -> None:
        """Does not connect yet.

        Args:
          urls: addresses of the servers, such as http://127.0.0.1:8000.
          max_positions: the longest sequence that the model takes.
          vocab_size: number of the model's tokens.
          max_requests: requests that a server has at a time.
          timeout: seconds until a request is given up and sent again.
          headers: of every request, such as what tells the servers' key.

        Raises:
          ValueError: for a URL that is none, or no URL at all.
        """
        self._max_positions, self._vocab_size = max_positions, vocab_size
        self._router = Router(
            urls, max_requests=max_requests, timeout=timeout, headers=headers or {}
        )
        self._pool = ThreadPoolExecutor(len(urls) * max_requests, thread_name_prefix="vllm")
        self._policy = _Policy(0)

    @property
    def version(self) -> int:
        """The policy version that was published last."""
        return self._policy.version

    def published(self, version: int, *, urls: Sequence[str], adapter: str | None = None) -> None:
        """Learns that these servers serve `version`; those that were lost are asked again.

        Args:
          version: of the policy.
          urls: of the servers.
          adapter: the name of the adapter that is this version; None if the weights are.
        """
        self._router.restore(urls)
        self._policy = _Policy(version, adapter)

    def sample(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
    ) -> Iterator[Completion]:
        """Draws `group_size` answers to every prompt, in the order in which they finish.

        A log-prob that the server does not give, or that is NaN or positive, is NaN.

        Args:
          prompts: i32[P] token ids each.
          params: how answers are drawn.
          group_size: answers per prompt.

        Raises:
          ValueError: at the call, as `check_request`.
          SamplerError: while iterating, if a server does not answer after several attempts or
            refuses a request. Completions that came before stay good.
        """
        prompts = [np.asarray(prompt) for prompt in prompts]
        check_request(
            prompts,
            params,
            group_size=group_size,
            max_positions=self._max_positions,
            vocab_size=self._vocab_size,
        )
        return self.sample_turns(
            [
                Turn(prompt, i, j, params.max_tokens)
                for i, prompt in enumerate(prompts)
                for j in range(group_size)
            ],
            params,
        )

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`; raises as `sample`. Answers to one context that follow each
        other are one request."""
        turns = [turn._replace(context=np.asarray(turn.context)) for turn in turns]
        check_turns(turns, max_positions=self._max_positions, vocab_size=self._vocab_size)
        groups: list[list[Turn]] = []
        for turn in turns:
            if groups and _follows(turn, groups[-1][-1]):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        policy = self._policy
        most = max((turn.prompt_index for turn in turns), default=-1) + 1
        seeds = np.random.SeedSequence(params.seed).generate_state(most, np.uint64) >> 2
        requests = [
            _Request(
                prompt_index=first.prompt_index,
                first=first.sample_index,
                count=len(group),
                prompt=first.context.tolist(),
                max_tokens=first.max_tokens,
                seed=int(seeds[first.prompt_index]),
                policy=policy,
                opening=hash(first.context[: first.opening].tobytes()),
            )
            for group in groups
            for first in group[:1]
        ]
        return self._completions(requests, params)

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the servers' weights say of given tokens, in one forward pass over each sequence.

        The log-probs are those of temperature 1 without truncation: vLLM computes no others for a
        prompt, and of another temperature they cannot be had from one token's log-prob alone.

        Args:
          sequences: i32[T] token ids each, of which the first is only context.

        Returns:
          For each sequence f32[T]: entry t is log p(tokens[t] | tokens[:t]). Entry 0 is NaN, and so
          is the last one of a sequence that fills the model's positions, because the server draws
          one more token than it scores.

        Raises:
          ValueError: for a sequence that `check_request` refuses as a prompt.
          SamplerError: as `sample`, or if a server serves another version than `self.version`.
        """
        sequences = [np.asarray(sequence) for sequence in sequences]
        check_request(
            sequences,
            SamplingParams(max_tokens=1),
            group_size=1,
            max_positions=self._max_positions + 1,
            vocab_size=self._vocab_size,
        )
        return list(self._pool.map(self._score, range(len(sequences)), sequences))

    def close(self) -> None:
        """See `Sampler.close`: closes the connections, so that servers drop what is in flight, and
        ends the threads."""
        self._router.hang_up()
        self._pool.shutdown(cancel_futures=True)
        self._router.close()

    def _completions(
        self, requests: Sequence[_Request], params: SamplingParams
    ) -> Iterator[Completion]:
        futures = [self._pool.submit(self._answers, one, params) for one in requests]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            for future in futures:
                future.cancel()

    def _answers(self, request: _Request, params: SamplingParams) -> list[Completion]:
        """The answers to one request; what a publish has aborted is continued."""
        done: list[Completion] = []
        todo = [request]
        while todo:
            one = todo.pop()
            for index, choice in enumerate(self._ask(one, params)):
                draft, reason = _read(choice, one)
                if reason == "abort":
                    todo.append(one._replace(first=one.first + index, count=1, begun=draft))
                else:
                    done.append(_completion(one, index, draft, reason=reason, stop=params.stop))
        return done

    def _ask(self, request: _Request, params: SamplingParams) -> list[dict[str, Any]]:
        return self._router.post(
            _PATH,
            json.dumps(_body(request, params)),
            read=lambda text: _choices(text, request),
            about=f"prompt {request.prompt_index}",
            # Where an answer was begun, the cache has all that was said in its episode.
            keys=[(request.opening, request.first + i) for i in range(request.count)],
        )

    def _score(self, index: int, sequence: np.ndarray) -> np.ndarray:
        known = sequence[: self._max_positions - 1].tolist()
        settings = {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,  # of the token itself and no other
            "detokenize": False,
            "ignore_eos": True,
        }
        found = self._router.post(
            _PATH,
            json.dumps({"token_ids": known, "sampling_params": settings} | _model(self._policy)),
            read=lambda text: _scores(text, known, policy=self._policy),
            about=f"sequence {index}",
        )
        unknown = [math.nan] * (len(sequence) - len(known))
        return np.array([math.nan, *found, *unknown], np.float32)


def _follows(turn: Turn, before: Turn) -> bool:
    """Whether it is the next answer to the same context."""
    same = (turn.prompt_index, turn.max_tokens) == (before.prompt_index, before.max_tokens)
    next_ = turn.sample_index == before.sample_index + 1
    return same and next_ and np.array_equal(turn.context, before.context)


def _body(request: _Request, params: SamplingParams) -> dict[str, Any]:
    begun = request.begun.tokens if request.begun else []
    settings: dict[str, Any] = {
        "n": request.count,
        "max_tokens": request.max_tokens - len(begun),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        # Another seed where an answer goes on, else it would draw the same numbers again.
        "seed": request.seed + request.first + len(begun),
        "logprobs": 0,  # of the token itself and no other
        "detokenize": False,
        # Only what `params` names ends an answer, whatever the server's own configuration says.
        "ignore_eos": True,
        "stop_token_ids": [stop[0] for stop in params.stop if len(stop) == 1],
    }
    asked = {"token_ids": request.prompt + begun, "sampling_params": settings}
    return asked | _model(request.policy)


def _model(policy: _Policy) -> dict[str, str]:
    return {} if policy.adapter is None else {"model": policy.adapter}


def _choices(text: str, request: _Request) -> list[dict[str, Any]]:
    choices = sorted(json.loads(text)["choices"], key=lambda choice: choice["index"])
    if len(choices) != request.count:
        raise SamplerError(
            f"prompt {request.prompt_index}: asked for {request.count} answers and got "
            f"{len(choices)}"
        )
    labels = {span["version"] for c in choices for span in c.get("weight_versions") or ()}
    for label in labels:
        if not label.isdigit():
            raise StrangerError(
                f"the server samples from weights {label!r}, which no learner has published"
            )
    return choices


def _scores(text: str, tokens: Sequence[int], *, policy: _Policy) -> list[float]:
    """Log-probs of all tokens but the first."""
    reply = json.loads(text)
    (span,) = reply["choices"][0]["weight_versions"]
    # A version of adapters is their name, and the weights below them have one of their own.
    if span["version"] != str(policy.version) and policy.adapter is None:
        kind = SamplerError if span["version"].isdigit() else StrangerError
        raise kind(
            f"the server scores with weights {span['version']!r} and {policy.version} were "
            "published last; they changed meanwhile"
        )
    return [
        _checked(entry[str(token)]["logprob"])
        for token, entry in zip(tokens[1:], reply["prompt_logprobs"][1:], strict=True)
    ]


def _read(choice: dict[str, Any], request: _Request) -> tuple[_Draft, str]:
    """A choice behind what was begun, and why it ended."""
    tokens = choice["token_ids"] or []
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [_checked(item.get("logprob")) for item in content[: len(tokens)]]
    logprobs += [math.nan] * (len(tokens) - len(logprobs))
    versions = [0] * len(tokens)
    for span in choice.get("weight_versions") or ():
        length = span["end"] - span["start"]
        versions[span["start"] : span["end"]] = [int(span["version"])] * length
    if request.policy.adapter is not None:
        versions = [request.policy.version] * len(tokens)
    before = request.begun or _Draft([], [], [])
    draft = _Draft(before.tokens + tokens, before.logprobs + logprobs, before.versions + versions)
    return draft, choice["finish_reason"]


def _checked(logprob: float | None) -> float:
    if logprob is None or not logprob <= _ROUNDING:
        return math.nan
    return min(logprob, 0.0)


def _completion(
    request: _Request, index: int, draft: _Draft, *, reason: str, stop: Sequence[Sequence[int]]
) -> Completion:
    end = _stop_sequence_end(draft.tokens, stop)
    tokens, logprobs, versions = (part[:end] for part in draft)
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=request.first + index,
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.asarray(versions, np.int32),
        finish_reason="length" if reason == "length" and end is None else "stop",
    )


def _stop_sequence_end(tokens: Sequence[int], stop: Sequence[Sequence[int]]) -> int | None:
    """Where the first stop sequence of several tokens ends, if there is one. Servers stop at single
    tokens only: they would look for texts, and text does not determine tokens."""
    ends = (
        i
        for sequence in stop
        if len(sequence) > 1
        for i in range(len(sequence), len(tokens) + 1)
        if tuple(tokens[i - len(sequence) : i]) == tuple(sequence)
    )
    return min(ends, default=None)
