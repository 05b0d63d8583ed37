"""What an environment says, in the words of the chat template: only what is appended is rendered.

The policy's own tokens are never looked at but for the last one, which says whether the turn ended
as the template ends it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.prompts import Tokenizer

_MARK = "\N{SYMBOL FOR START OF TEXT}"  # stands for a turn of the policy
_CONTROL = re.compile(r"[<\[].+[>\]]")


class Chat:
    """Appends messages to conversations of token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Of a model.

        Raises:
          ValueError: if the tokenizer has no chat template, or one that leaves out messages.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                "the environment speaks in the model's chat template and its tokenizer has none; "
                "add one to its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        added = [*tokenizer.get_added_vocab()]
        self._control = sorted(filter(_CONTROL.fullmatch, added), key=len, reverse=True)
        if _MARK not in self._appended([{"role": "user", "content": _MARK}]):
            raise ValueError("the model's chat template does not show what the user says")
        self._has_tools = self._shows_tools()

    def text(self, tokens: np.ndarray) -> str:
        """What the policy said, i[C], with its control tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def user(self, text: str, *, after: np.ndarray) -> np.ndarray:
        """A message of the user, i32[N], up to where the policy's next turn begins.

        Args:
          text: of the message; control tokens in it are taken apart.
          after: i32[C], the turn before.
        """
        return self._tokens([{"role": "user", "content": self.harmless(text)}], after=after)

    def tool_responses(self, texts: Sequence[str], *, after: np.ndarray) -> np.ndarray:
        """As `user`, what tools have answered: messages of the role tool where the template knows
        it, i32[N], else a message of the user with a <tool_response> for each."""
        contents = [self.harmless(text) for text in texts]
        if self._has_tools:
            return self._tokens([{"role": "tool", "content": c} for c in contents], after=after)
        joined = "\n".join(f"<tool_response>\n{c}\n</tool_response>" for c in contents)
        return self._tokens([{"role": "user", "content": joined}], after=after)

    def _tokens(self, messages: Sequence[Mapping[str, Any]], *, after: np.ndarray) -> np.ndarray:
        text = self._appended(messages)
        # What ends a turn in the template has been sampled already, unless the turn ended by a
        # stop sequence of the config.
        text = text.removeprefix(self.text(after[-1:]))
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _appended(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes behind the words of a turn."""
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
        whole = self._tokenizer.apply_chat_template(
            [*before, *messages], tokenize=False, add_generation_prompt=True
        )
        return whole.partition(_MARK)[2]

    def _shows_tools(self) -> bool:
        try:
            return _MARK in self._appended([{"role": "tool", "content": _MARK}])
        except Exception:  # whatever a template raises for a role that it does not know
            return False

    def harmless(self, text: str) -> str:
        """The text with a space in each control token: nobody but the template ends a turn."""
        for token in self._control:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text
