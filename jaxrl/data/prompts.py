"""Prompts: rows of a file or hub data set, rendered, tokenised, taken in a reproducible order."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Ids of all tokens."""
        ...

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of the tokens that were added to the vocabulary, control tokens among them."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """The text of token ids."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, tools: Any = None
    ) -> Any:
        """Messages as one text."""
        ...


class Row(NamedTuple):
    """One record and where it stands, for messages."""

    where: str  # "prompts.jsonl:17"
    record: dict[str, Any]


class Example(NamedTuple):
    """One prompt.

    Attributes:
      tokens: i32[P], the rendered prompt.
      record: the row of the data; `prompt` is the rendered text and `answer` the reference answer.
      row: the row as it stands in the data.
    """

    tokens: np.ndarray
    record: Mapping[str, Any]
    row: Mapping[str, Any]


class Prompts(NamedTuple):
    """Prompts in the order of the file.

    Attributes:
      examples: those that are short enough.
      too_long: number of prompts that were left out because they have too many tokens.
    """

    examples: Sequence[Example]
    too_long: int


class Rendering(NamedTuple):
    """How a prompt becomes text; the first fields are the keys of config.PromptConfig.

    Attributes:
      template, system_prompt, prompt_format: see there.
      tools: JSON schemas that the chat template is given.
    """

    template: Literal["auto", "chat", "text"] = "auto"
    system_prompt: str | None = None
    prompt_format: str = "{prompt}"
    tools: tuple[Mapping[str, Any], ...] = ()


def read_rows(path: str, *, split: str = "train") -> Iterator[Row]:
    """The records of a .jsonl or .parquet file, or of a data set on the Hugging Face hub.

    Args:
      path: a file, or a data set on the hub: `ID`, `ID:SUBSET` or `ID:SUBSET:SPLIT`.
      split: of a data set on the hub whose path names none.

    Raises:
      ValueError: for a file that is missing or of another kind, or a line that is no JSON object;
        the message names file and line.
      ModuleNotFoundError: for a hub id when `datasets` is not installed.
    """
    suffix = Path(path).suffix
    if suffix == ".jsonl":
        return _read_jsonl(_existing(path))
    if suffix == ".parquet":
        return _read_parquet(_existing(path))
    if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(f"{path}: data is a .jsonl or .parquet file, or the id of a hub data set")
    name, subset, named_split, *more = [*path.split(":"), "", ""]
    if len(more) > 2:
        raise ValueError(f"{path}: a hub data set is written ID, ID:SUBSET or ID:SUBSET:SPLIT")
    return _read_hub(name, split=named_split or split, subset=subset or None)


def load_prompts(
    rows: Iterator[Row],
    tokenizer: Tokenizer,
    *,
    prompt_key: str,
    answer_key: str | None,
    rendering: Rendering,
    max_tokens: int,
    limit: int | None = None,
) -> Prompts:
    """Renders and tokenises prompts.

    Args:
      rows: from `read_rows`.
      tokenizer: the model's.
      prompt_key: column with a text or a list of {role, content} messages.
      answer_key: column that becomes `record["answer"]`; None if there is none.
      rendering: how a prompt becomes text.
      max_tokens: longer prompts are left out and counted.
      limit: stop after this many prompts.

    Raises:
      ValueError: for a row without the key or with another type there, or if no prompt is left; the
        message names file, line and key.
    """
    render = renderer(tokenizer, rendering)
    examples: list[Example] = []
    too_long, where = 0, "the data"
    for where, record in rows:
        if limit is not None and len(examples) == limit:
            break
        text = render(prompt_of(record, prompt_key, where=where), where=where)
        tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
        if len(tokens) > max_tokens:
            too_long += 1
            continue
        if len(tokens) == 0:
            raise ValueError(f"{where}: the prompt under {prompt_key!r} has no tokens")
        answer = {"answer": column(record, answer_key, where=where)} if answer_key else {}
        examples.append(Example(tokens, {**record, "prompt": text, **answer}, record))
    if not examples:
        raise ValueError(
            f"{where}: no prompt to use; {too_long} have more than {max_tokens} tokens"
        )
    return Prompts(examples, too_long)


class Render(Protocol):
    """Prompt as it stands in the data -> text for the model."""

    def __call__(self, prompt: str | list[dict[str, str]], *, where: str) -> str:
        """`where` names the row in messages."""
        ...


def renderer(tokenizer: Tokenizer, rendering: Rendering) -> Render:
    """The function that renders prompts.

    The text ends where the model's answer begins. It includes the special tokens that the chat
    template writes and no others.

    Raises:
      ValueError: if the rendering needs a chat template and the tokenizer has none.
    """
    has_template = bool(tokenizer.chat_template)
    chat = rendering.template == "chat" or (rendering.template == "auto" and has_template)
    if chat and not has_template:
        raise ValueError(
            "data.template = 'chat', and the model's tokenizer has no chat template; "
            "add one to its tokenizer_config.json or set data.template = 'text'"
        )
    if rendering.system_prompt is not None and not chat:
        raise ValueError(
            "data.system_prompt needs a chat template, and the model's tokenizer has none; "
            "put the text into data.prompt_format"
        )

    def render(prompt: str | list[dict[str, str]], *, where: str) -> str:
        if not chat:
            if not isinstance(prompt, str):
                raise ValueError(f"{where}: the prompt is a list of messages and needs a template")
            return rendering.prompt_format.replace("{prompt}", prompt)
        system = rendering.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            user = rendering.prompt_format.replace("{prompt}", prompt)
            messages.append({"role": "user", "content": user})
        else:
            messages.extend(prompt)
        tools: dict[str, Any] = {"tools": list(rendering.tools)} if rendering.tools else {}
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **tools
        )

    return render


def take(size: int, *, position: int, count: int, seed: int) -> np.ndarray:
    """Which of `size` examples come next, i64[count].

    Each epoch is a permutation of all examples that depends on `seed` and the epoch's number alone,
    so the position, a number of examples taken since the start, is all that a checkpoint holds. The
    position after it is `position + count`.
    """
    places = np.arange(position, position + count)
    return np.array([_permutation(size, int(p) // size, seed)[p % size] for p in places])


@functools.lru_cache(maxsize=2)
def _permutation(size: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def column(record: Mapping[str, Any], key: str, *, where: str) -> Any:
    """The value of a column.

    Raises:
      ValueError: if there is none; the message names the place and the columns that exist.
    """
    if record.get(key) is None:
        raise ValueError(f"{where}: no {key!r}; the columns are {', '.join(map(repr, record))}")
    return record[key]


def prompt_of(record: Mapping[str, Any], key: str, *, where: str) -> str | list[dict[str, str]]:
    """The prompt in a column: a text, or a list of messages with role and content.

    Raises:
      ValueError: if it is anything else; the message names the place.
    """
    value = column(record, key, where=where)
    messages = list(value) if isinstance(value, (list, tuple, np.ndarray)) else None
    if isinstance(value, str):
        return value
    if messages and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in messages):
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    raise ValueError(
        f"{where}: {key!r} is {value!r:.80}, "
        "expected a text or a list of {role, content} messages"
    )


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file (relative to {Path.cwd()})")
    return Path(path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: expected an object with keys, got {line.strip():.80}")
            yield Row(where, record)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield Row(f"{path}: row {number}", record)


def _read_hub(path: str, *, split: str, subset: str | None) -> Iterator[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"data {path!r} is no file, and reading it from the Hugging Face hub needs the package "
            "datasets: pip install datasets"
        ) from None
    try:
        rows = datasets.load_dataset(path, name=subset, split=split)
    except Exception as error:
        raise ValueError(
            f"data {path!r} (subset {subset!r}, split {split!r}) is no file here and could not be "
            f"loaded from the Hugging Face hub: {error}"
        ) from error
    for number, record in enumerate(rows):
        yield Row(f"{path}[{split}] row {number}", dict(record))
