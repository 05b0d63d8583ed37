"""Rendering of new messages with the model's chat template; earlier turns are never re-rendered."""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl.data.ends import after_words, control_tokens, turn_end
from jaxrl.data.templates import MARK, apply_template
from jaxrl.data.tokenizer import Tokenizer


class Chat:
    """Renders messages to append to a conversation of token ids.

    It reads only the last token of the policy's turn, to see whether that already is the template's
    end of a turn.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Prepares the chat template of a tokenizer, and its variables; raises ValueError if it is
        missing or drops messages."""
        if not tokenizer.chat_template:
            raise ValueError(
                "the environment needs the model's chat template, and its tokenizer has none; "
                "add one to its tokenizer_config.json"
            )
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs
        self._control, self._end = [*control_tokens(tokenizer)], turn_end(tokenizer)
        if MARK not in self._rendered([{"role": "user", "content": MARK}]):
            raise ValueError("the model's chat template drops user messages")
        try:
            self._has_tools = MARK in self._rendered([{"role": "tool", "content": MARK}])
        except ValueError:  # a template may refuse an unknown role
            self._has_tools = False

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of token ids, i[C], control tokens included."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, i32[N]."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def user_message(self, text: str, *, after: np.ndarray) -> np.ndarray:
        """Renders a user message after the policy's turn i32[C], up to the beginning of its next
        turn, as token ids i32[N]. Control tokens in the text are escaped."""
        return self.messages([{"role": "user", "content": text}], after=after)

    def messages(self, messages: Sequence[Mapping[str, str]], *, after: np.ndarray) -> np.ndarray:
        """Renders messages with role and content as `user_message` does, i32[N].

        Results of tools keep the role `tool` if the template knows it. Otherwise they are one user
        message with a <tool_response> for each.
        """
        said: list[dict[str, str]] = []
        for is_tool, run in itertools.groupby(messages, lambda m: m["role"] == "tool"):
            escaped = [m | {"content": self.escape(m["content"])} for m in map(dict, run)]
            if is_tool and not self._has_tools:
                results = (f"<tool_response>\n{m['content']}\n</tool_response>" for m in escaped)
                escaped = [{"role": "user", "content": "\n".join(results)}]
            said += escaped
        # The end of the policy's turn is sampled already, unless one of the config's stop sequences
        # ended the turn.
        end = self.decode(after[-1:])
        if self._end is not None and [*after[-1:]] == [self._end.token]:
            end = self._end.text
        return self.encode(self._rendered(said).removeprefix(end))

    def escape(self, text: str) -> str:
        """Returns the text with a space inside each control token, so that it cannot end a turn.

        Lone surrogates become "?": a tool may return them, and no tokenizer takes them.
        """
        text = text.encode(errors="replace").decode()
        for token in self._control:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Renders a conversation with the model's chat template, up to the beginning of the next
        turn; raises ValueError if the template fails."""
        return apply_template(
            self.tokenizer, messages, tools=tools, template_kwargs=self.template_kwargs
        )

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the template's text after the words of a turn."""
        return after_words(
            self.tokenizer,
            messages,
            add_generation_prompt=True,
            template_kwargs=self.template_kwargs,
        )
