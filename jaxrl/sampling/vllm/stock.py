"""A client of vLLM servers without jaxrl's engine, by the route that every vLLM has.

It asks only for what they all take. vLLM on a TPU takes no seed of a request and no `min_p`, and
reports log-probs of tokens only when asked for one more, and none of a prompt. No answer says which
weights sampled it, so a token's version is that of the adapter that the request names.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.sampling.base import Completion, SamplingParams, Turn
from jaxrl.sampling.vllm.router import SamplerError
from jaxrl.sampling.vllm.sampler import HttpRequest, VllmSampler, sampling_settings

_PATH = "/v1/completions"


class StockSampler(VllmSampler):
    """Samples adapters of vLLM servers through /v1/completions.

    Completions are not reproducible: requests have no seed. `score` is not available.
    """

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `VllmSampler.sample_turns`; also raises ValueError for `min_p`, which some of these
        servers ignore."""
        if params.min_p:
            raise ValueError(
                f"sampling.min_p = {params.min_p}: a server without jaxrl's engine may ignore it, "
                "as vLLM on a TPU does; set it to 0, or use top_p"
            )
        return super().sample_turns(turns, params)

    def _generate(self, request: HttpRequest) -> list[dict[str, Any]]:
        settings = sampling_settings(request)
        for name in ("seed", "min_p", "detokenize"):
            del settings[name]
        asked = {
            "model": request.served.adapter,
            "prompt": request.turns[0].context.tolist() + request.partial.tokens,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **settings,
            "logprobs": 1,
        }
        return self._post(request, asked, path=_PATH)

    def _read(self, text: str, request: HttpRequest) -> list[dict[str, Any]]:
        choices = json.loads(text)["choices"]
        for choice in choices:
            if choice.get("token_ids") is None:
                raise SamplerError(
                    "the server returns no token ids; it needs a vLLM that knows return_token_ids"
                )
            found = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            choice["logprobs"] = {"content": [{"logprob": logprob} for logprob in found]}
        return self._checked(choices, request)
