"""The parameters of the APIs: the gateway reads each, ignores it, or refuses it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.environments.gateway.dialect import Body, refuse


class Refusal(NamedTuple):
    """A parameter that would change the answer, and that the policy cannot follow.

    Attributes:
      advice: what to do instead.
      allowed: values that ask for nothing; so do None, False, 0 and what is empty. Each entry of a
        list may be one of them.
    """

    advice: str
    allowed: Sequence[Any] = ()


class Parameters(NamedTuple):
    """The parameters of one API. `A.B` is the entry B of the parameter A.

    Attributes:
      read: those that the dialect reads.
      ignored: those without effect on a turn. docs/environments.md lists them.
      refused: those that are refused, by name.
    """

    read: Sequence[str]
    ignored: Sequence[str]
    refused: Mapping[str, Refusal]


_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_POLICY = "tokens are drawn from the policy's own distribution; leave it out"
_TEXT = "the policy writes text; leave it out"
_GRAMMAR = Refusal(
    "the policy is sampled without a grammar; leave it out and parse the text, or use a tool",
    [{"type": "text"}],
)
_STORED = Refusal("the gateway stores no conversations; send the whole one")
_REMOTE = Refusal("no tools run on the server; send tools that the agent runs itself")
_MODERATED = Refusal("nothing is moderated; leave it out")
_LOGPROBS = Refusal("the gateway records log-probs itself; leave it out")
_SHARED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

CHAT = Parameters(
    read=(
        *("messages", "model", "max_completion_tokens", "max_tokens", "stop", "stream", "tools"),
        *("tool_choice", "stream_options.include_usage", *_SAMPLING),
    ),
    ignored=(
        *_SHARED,
        *("prediction", "reasoning_effort", "stream_options.include_obfuscation", "verbosity"),
    ),
    refused={
        "audio": Refusal(_TEXT),
        "frequency_penalty": Refusal(_POLICY),
        "function_call": Refusal("send tools and tool_choice", ["auto", "none"]),
        "functions": Refusal("send tools"),
        "logit_bias": Refusal(_POLICY),
        "logprobs": _LOGPROBS,
        "modalities": Refusal(_TEXT, ["text"]),
        "moderation": _MODERATED,
        "n": Refusal("a request has one answer; send several requests", [1]),
        "presence_penalty": Refusal(_POLICY),
        "response_format": _GRAMMAR,
        "top_logprobs": _LOGPROBS,
        "web_search_options": _REMOTE,
    },
)

RESPONSES = Parameters(
    read=(
        *("input", "instructions", "max_output_tokens", "model", "stream", "tools"),
        *("tool_choice", *_SAMPLING),
    ),
    ignored=(
        *_SHARED,
        *("access_programs", "image", "max_tool_calls", "reasoning", "stream_options"),
        *("text.verbosity", "truncation"),
    ),
    refused={
        "background": Refusal("wait for the answer"),
        "background_options": Refusal("wait for the answer"),
        "context_management": Refusal("send the conversation as the policy is to read it"),
        "conversation": _STORED,
        "include": Refusal(
            "an answer holds none; leave it out",
            [
                "reasoning.encrypted_content",  # clients ask for it in case there is some
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
                "web_search_call.action.sources",
                "web_search_call.results",
            ],
        ),
        "moderation": _MODERATED,
        "previous_response_id": _STORED,
        "prompt": Refusal("the gateway stores no prompts; send its messages"),
        "text.format": _GRAMMAR,
        "top_logprobs": _LOGPROBS,
    },
)

MESSAGES = Parameters(
    read=(
        *("max_tokens", "messages", "model", "stop_sequences", "stream", "system", "tools"),
        *("tool_choice", "thread", *_SAMPLING),
    ),
    ignored=(
        *("betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token"),
        *("fallbacks", "inference_geo", "metadata", "output_config.effort", "service_tier"),
        *("speed", "thinking", "user_profile_id", "workspace_id"),
    ),
    refused={
        "compaction": Refusal("send the conversation as the policy is to read it"),
        "container": _REMOTE,
        "context_management.edits": Refusal(
            "send the conversation as the policy is to read it",
            [  # thoughts that are sent back are not read in any case
                {"type": "clear_thinking_20251015"},
                {"type": "clear_thinking_20251015", "keep": "all"},
            ],
        ),
        "mcp_servers": Refusal("no tools run on the server; send the tools of these servers"),
        "output_config.format": _GRAMMAR,
        "output_config.task_budget": Refusal("set max_tokens"),
        "output_format": _GRAMMAR,
    },
)


def check_parameters(body: Body, parameters: Parameters) -> None:
    """Raises TurnRefusedError for a parameter that is unknown or not supported, unless its value
    asks for nothing. The message has its name, its value and what to do."""
    nested = {
        name.partition(".")[0]
        for name in (*parameters.read, *parameters.ignored, *parameters.refused)
        if "." in name
    }
    given = dict[str, Any]()
    for name, value in body.items():
        if name in nested and isinstance(value, dict):
            given |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            given[name] = value
    for name, value in given.items():
        if name in parameters.read or name in parameters.ignored or not value:
            continue
        refusal, shown = parameters.refused.get(name), f"{name} = {value!r:.80}"
        if refusal is None:
            refuse(True, f"{shown}: the gateway knows no such parameter; leave it out")
        else:
            asked = value if isinstance(value, list) else [value]
            wrong = any(one not in refusal.allowed for one in asked)
            refuse(wrong, f"{shown} is not supported: {refusal.advice}")
