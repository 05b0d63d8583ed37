"""The `[data]` table of a config, and the parts that other commands share."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from jaxrl.config.section import Section, TemplateKwargs


class PromptConfig(Section):
    """Rendering of prompts as text."""

    template: Literal["auto", "chat", "text"] = "auto"
    """`chat` applies the tokenizer's chat template, `text` leaves the prompt unchanged after
    the tokenizer's own first tokens, `auto` applies the chat template if the tokenizer has one."""

    system_prompt: str | None = None
    """System message before every prompt; needs a chat template."""

    prompt_format: str = "{prompt}"
    """Text of the user message; `{prompt}` stands for the prompt in the data."""

    template_kwargs: TemplateKwargs = Field({})
    """Variables of the chat template, such as {enable_thinking = false}, as a table of their own.
    A name that the template does not read is an error."""

    @field_validator("prompt_format")
    @classmethod
    def _holds_prompt(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError("it lacks the prompt; write {prompt} where the prompt belongs")
        return value

    def _contradictions(self) -> Iterator[str]:
        if self.system_prompt is not None and self.template == "text":
            yield (
                "system_prompt needs a chat template, and template = 'text' uses none; put the "
                "text into prompt_format, or set template = 'chat'"
            )
        if self.template_kwargs and self.template == "text":
            yield (
                "template_kwargs are for a chat template, and template = 'text' uses none; remove "
                "one of the two keys"
            )


class TextsConfig(PromptConfig):
    """Prompts or texts to train on."""

    path: str
    """A .jsonl, .jsonl.gz or .parquet file, or a pattern of such files, `data/train-*.parquet`,
    which are read in the order of their names. Or a data set on the Hugging Face hub, written `ID`,
    `ID:SUBSET` or `ID:SUBSET:SPLIT` (split `train` if not given; needs the `hub` extra). Or a task
    of reasoning-gym with its settings, `reasoning_gym:leg_counting:size=2000,max_animals=5` (needs
    the `reasoning-gym` extra), whose scorer is then the default of reward.path."""


class HeldOutConfig(TextsConfig):
    """Data to train on and held-out data."""

    eval_path: str | None = None
    """Held-out data, in the same forms (split `test` if not given)."""

    eval_limit: PositiveInt | None = None
    """Evaluate on the first N rows of the held-out data; on all of them if absent."""


class DataConfig(HeldOutConfig):
    """Training prompts and held-out prompts."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    answer_key: str | None = "answer"
    """Column with the reference answer, which reward functions read as `example["answer"]`; `none`
    if the data has no such column."""

    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are dropped and counted."""
