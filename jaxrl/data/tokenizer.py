"""The part of a tokenizer that jaxrl uses."""

from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that jaxrl uses."""

    chat_template: Any
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of a text."""

    def get_vocab(self) -> dict[str, int]:
        """Returns {token: id} of all tokens."""

    def get_added_vocab(self) -> dict[str, int]:
        """Returns {token: id} of tokens added to the vocabulary, control tokens included."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Returns the text of token ids."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> Any:
        """Renders messages as one text."""
