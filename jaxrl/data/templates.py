"""Prompts and conversations as text, rendered with the model's chat template."""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.defaults
import jinja2.meta
from jinja2 import nodes

from jaxrl.data.messages import REFERENCES, Message, RawPrompt, call_arguments, spellings
from jaxrl.data.rows import check_characters
from jaxrl.data.tokenizer import Tokenizer

MARK = "\N{SYMBOL FOR START OF TEXT}"  # stands for the words of a turn
_GIVEN = {"messages", "tools", "add_generation_prompt", "tokenize"}  # variables that are set here
_BUILTIN = {*jinja2.defaults.DEFAULT_NAMESPACE, "raise_exception", "strftime_now", "documents"}
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag of transformers alone


class Rendering(NamedTuple):
    """The rendering of prompts to text."""

    template: Literal["auto", "chat", "text"] = "auto"  # "auto": "chat" if there is a template
    system_prompt: str | None = None  # content of a first message; needs a chat template
    prompt_format: str = "{prompt}"  # {prompt} is replaced by the prompt
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas for the chat template
    template_kwargs: Mapping[str, Any] = MappingProxyType({})  # variables of the chat template


def uses_template(tokenizer: Tokenizer, rendering: Rendering) -> bool:
    """True if a chat template renders the prompts."""
    auto = rendering.template == "auto" and bool(tokenizer.chat_template)
    return auto or rendering.template == "chat"


class Turn(NamedTuple):
    """A turn of the assistant in a conversation."""

    prompt: str  # up to the beginning of the turn, as in sampling
    words: str  # the turn as the template renders it, without its end


class Renderer:
    """Renders prompts, and conversations turn by turn. Texts end where the completion begins."""

    def __init__(self, tokenizer: Tokenizer, rendering: Rendering) -> None:
        """Prepares the chat template; raises as `make_renderer`."""
        self._tokenizer, self._rendering = tokenizer, rendering
        self._sound = set[Any]()  # shapes of conversations that the template renders wholly
        check_variables(tokenizer, rendering.template_kwargs)
        self._chat = uses_template(tokenizer, rendering)
        if self._chat and not tokenizer.chat_template:
            raise ValueError(
                "data.template = 'chat', but the model's tokenizer has no chat template; "
                "add one to its tokenizer_config.json or set data.template = 'text'"
            )
        if rendering.system_prompt is not None and not self._chat:
            raise ValueError(
                "data.system_prompt needs a chat template, but the model's tokenizer has none; "
                "put the text into data.prompt_format"
            )

    def __call__(
        self, prompt: RawPrompt, where: str, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Renders a prompt, with the tools of its row. `where` is the row's place for errors.

        Raises:
          ValueError: for messages that the template does not show, or that end with the
            assistant's.
        """
        if not self._chat:
            return self._text(prompt, where, tools=tools)
        try:
            tools, messages = self._tools(tools), self._messages(prompt)
            if messages[-1]["role"] == "assistant":
                raise ValueError(
                    f"{self._name(messages, len(messages) - 1)}: a prompt must not end with the "
                    "assistant's words, because the completion is a new turn; to have them "
                    "continued, write the whole prompt as a text, with data.template = 'text'"
                )
            return self._rendered(messages, tools=tools)[1]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def turns(
        self,
        prompt: RawPrompt,
        answer: Sequence[Message],
        where: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[Turn]:
        """Yields each turn of the assistant in `answer`, the messages after a prompt. Each is
        rendered as the last message of its conversation, as in sampling."""
        if not self._chat:
            text = self._text(prompt, where, tools=tools)
            (message,) = answer  # a text as prompt comes with one
            if not isinstance(message["content"], str) or set(message) > {"role", "content"}:
                raise ValueError(
                    f"{where}: the assistant's message holds more than a text; it needs a chat "
                    "template"
                )
            yield Turn(text, message["content"])
            return
        try:
            tools, before = self._tools(tools), self._messages(prompt)
            messages, _ = self._rendered([*before, *answer], tools=tools, whole=True)
            for place in range(len(before), len(messages)):
                if messages[place]["role"] == "assistant":
                    yield self._turn(messages[: place + 1], tools=tools)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _turn(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]) -> Turn:
        """Returns the turn of the last message."""
        name = self._name(messages, len(messages) - 1)
        prompt = self._apply(messages[:-1], tools=tools)
        whole = self._apply(messages, tools=tools, whole=True)
        if whole.startswith(prompt):
            words = whole[len(prompt) :]
        else:  # the template renders earlier messages differently once they are answered
            marked = [*messages[:-1], {"role": "assistant", "content": MARK}]
            opening = self._apply(marked, tools=tools, whole=True).partition(MARK)[0]
            if prompt.startswith(opening) or not whole.startswith(opening):
                raise ValueError(
                    f"{name}: the template begins a new turn with "
                    f"{prompt[-40:]!r}, which the turn as it renders it lacks; write the prompt "
                    "and the completion as texts, or set a variable in data.template_kwargs"
                )
            words = whole[len(opening) :]
        words = words.removesuffix(self._end)
        said = messages[-1]["content"]
        texts = [part["text"] for part in said] if isinstance(said, list) else [said or ""]
        for text in texts:
            if _squeezed(text) not in _squeezed(words):
                raise ValueError(
                    f"{name}: the model's chat template drops part of "
                    f"the content {text!r:.80}; write the prompt and the completion as texts"
                )
        return Turn(prompt, words)

    @functools.cached_property
    def _end(self) -> str:
        """The template's text after the words of the assistant."""
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        try:
            return self._apply(messages, whole=True).partition(MARK)[2]
        except ValueError:
            return ""

    def _text(self, prompt: RawPrompt, where: str, *, tools: Sequence[Mapping[str, Any]]) -> str:
        if not isinstance(prompt, str):
            raise ValueError(f"{where}: the prompt is a list of messages; it needs a chat template")
        if tools:
            raise ValueError(f"{where}: the row has 'tools', which need a chat template")
        return self._rendering.prompt_format.replace("{prompt}", prompt)

    def _messages(self, prompt: RawPrompt) -> list[Message]:
        system = self._rendering.system_prompt
        messages: list[Message] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            user = self._rendering.prompt_format.replace("{prompt}", prompt)
            return [*messages, {"role": "user", "content": user}]
        if messages and prompt[0]["role"] == "system":
            raise ValueError(
                "the row begins with a system message, and data.system_prompt is set; remove one"
            )
        return [*messages, *prompt]

    def _tools(self, own: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if own and self._rendering.tools:
            raise ValueError(
                "the row has 'tools', and so has environment.tools; remove the column, or the key"
            )
        return own or self._rendering.tools

    def _apply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        whole: bool = False,
    ) -> str:
        return apply_template(
            self._tokenizer,
            messages,
            tools=tools,
            template_kwargs=self._rendering.template_kwargs,
            add_generation_prompt=not whole,
        )

    def _rendered(
        self, messages: list[Message], *, tools: Sequence[Mapping[str, Any]], whole: bool = False
    ) -> tuple[list[Message], str]:
        """Returns the first spelling of messages that the template renders with all of its keys,
        and its text.

        Raises:
          ValueError: if there is none; it tells the fault of the messages as they are given.
        """
        for form in spellings(messages):
            try:
                return form, self._check(form, tools=tools, whole=whole)
            except ValueError:
                continue
        # The fault is in the message after the longest beginning that can be rendered, or in it.
        fault: ValueError | None = None
        for length in range(len(messages), 0, -1):
            try:
                self._apply(messages[:length], tools=tools, whole=whole)
            except ValueError as error:
                fault = fault or error
                continue
            self._check(messages[:length], tools=tools, whole=whole)
            raise ValueError(f"{self._name(messages, length)}: {fault}") from fault
        assert fault is not None
        raise fault

    def _check(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], whole: bool
    ) -> str:
        """Returns the text of messages; raises ValueError for a key of a message, or tools, that
        the template does not show."""
        text = self._apply(messages, tools=tools, whole=whole)
        for place, message in enumerate(messages):
            for given in call_arguments(message):
                if isinstance(given, str) and json.dumps(given, ensure_ascii=False) in text:
                    raise ValueError(
                        f"{self._name(messages, place)}: the model's chat template quotes the "
                        f"text of the arguments {given:.80}; write them as an object"
                    )
        shape = (whole, bool(tools), *map(_shape, messages))
        if shape in self._sound:
            return text
        own = tools is not self._rendering.tools
        if tools and own and self._apply(messages, whole=whole) == text:
            raise ValueError(
                "the model's chat template does not show the row's 'tools'; remove the column, or "
                "put a template that shows them into the model's tokenizer_config.json"
            )
        for place, message in enumerate(messages):
            for key in set(message) - {"role"} - REFERENCES:
                if message[key] and not self._shows(messages, place, key, tools=tools, whole=whole):
                    raise ValueError(
                        f"{self._name(messages, place)}: the model's chat template does not show "
                        f"{key} = {message[key]!r:.80}; remove the key or write it into the "
                        "content, or put a template that shows it into the model's "
                        "tokenizer_config.json"
                    )
        self._sound.add(shape)
        return text

    def _shows(self, messages: Sequence[Message], place: int, key: str, **options: Any) -> bool:
        """Tells if a message's key changes the text of the conversation, or of its beginning:
        templates drop thoughts of earlier turns."""
        message = messages[place]
        changed = {k: v for k, v in message.items() if k != key}
        if key == "content":
            changed["content"] = MARK
        for length in (len(messages), *range(place + 1, len(messages))):
            some = [*messages[:length]]
            try:
                text = self._apply(some, **options)
                some[place] = changed
                if self._apply(some, **options) != text:
                    value = message[key]
                    return not isinstance(value, list) or key != "content" or str(value) not in text
            except ValueError:
                if length == len(messages):
                    return True  # the template needs the key
        return False

    def _name(self, messages: Sequence[Message], place: int) -> str:
        """Returns the number of a message in the data, and its role."""
        added = self._rendering.system_prompt is not None
        return f"message {place + 1 - added} ({messages[place]['role']})"


def make_renderer(tokenizer: Tokenizer, rendering: Rendering) -> Renderer:
    """Returns the function that renders prompts: (prompt, the row's place for errors) -> text.

    Only the chat template writes special tokens.

    Raises:
      ValueError: if the rendering needs a chat template and the tokenizer has none, or for a
        variable that the template does not read.
    """
    return Renderer(tokenizer, rendering)


def check_variables(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for a variable that the tokenizer's chat template does not read."""
    known = template_variables(tokenizer)
    for name, value in template_kwargs.items():
        given = f"template_kwargs.{name} = {value!r:.80}"
        if name in _GIVEN:
            raise ValueError(f"{given}: jaxrl sets this variable itself; remove the key")
        if not tokenizer.chat_template:
            raise ValueError(
                f"{given} needs a chat template, but the model's tokenizer has none; remove the key"
            )
        if name not in known:
            raise ValueError(
                f"{given}: the model's chat template does not read this variable; it reads "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def template_variables(tokenizer: Tokenizer) -> frozenset[str]:
    """Returns the names of the variables that a tokenizer's chat template reads, without those that
    every template has."""
    given = tokenizer.chat_template or ""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    found = set[str]()
    for text in given.values() if isinstance(given, dict) else [given]:
        try:
            parsed = environment.parse(_GENERATION.sub("", text))
            free = jinja2.meta.find_undeclared_variables(parsed)
        except Exception:  # a fault that rendering tells
            continue
        names = list(parsed.find_all(nodes.Name))
        tests = [t.node for t in parsed.find_all(nodes.Test) if t.name in ("defined", "undefined")]
        # A variable that the template itself sets is read from outside if it is a default.
        own = {n.name for n in names if n.ctx == "store"} - {
            node.name for node in tests if isinstance(node, nodes.Name)
        }
        found |= free - own
    return frozenset(n for n in found - _GIVEN - _BUILTIN if not n.endswith("_token"))


def apply_template(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    add_generation_prompt: bool = True,
) -> str:
    """Renders messages with the model's chat template, up to the beginning of the next turn, or
    without `add_generation_prompt` up to the end of the last message.

    Raises:
      ValueError: if the template fails or returns no valid text.
    """
    given: dict[str, Any] = {"tools": list(tools)} if tools else {}
    given |= template_kwargs
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **given
        )
    except Exception as error:
        raise ValueError(
            f"the model's chat template cannot render {list(messages)!r:.200}: {error!r:.200}; "
            "correct the template, or set data.template = 'text'"
        ) from error
    if not isinstance(text, str):
        raise ValueError(
            f"the model's chat template returns {text!r:.80}, expected a text; correct "
            "chat_template in its tokenizer_config.json, or set data.template = 'text'"
        )
    try:
        check_characters(text)
    except ValueError as error:
        raise ValueError(
            f"the model's chat template renders {list(messages)!r:.200} as text in which {error}"
        ) from None
    return text


def _shape(message: Message) -> Any:
    """Returns all of a message except for its texts."""
    return message["role"], tuple((k, type(v), bool(v)) for k, v in sorted(message.items()))


def _squeezed(text: str) -> str:
    return "".join(text.split())
