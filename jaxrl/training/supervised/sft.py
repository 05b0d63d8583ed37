"""Supervised fine-tuning: cross-entropy, or another loss, over completion tokens, packed."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl.builders.model import find_trained
from jaxrl.builders.prompts import read_data, rendering
from jaxrl.builders.supervised import set_up, supervised_shape
from jaxrl.config.supervised import SFTConfig, SFTDataConfig
from jaxrl.core import Hosts, Minibatch, Rollout, given_rollout, pack_minibatch
from jaxrl.data import (
    Message,
    RawPrompt,
    Rendering,
    Row,
    Spool,
    Tokenizer,
    completion_encoder,
    make_renderer,
    most_characters,
    prompt_encoder,
    read_prompt,
    read_text,
    read_tools,
    start_tokens,
)
from jaxrl.learner import make_learner
from jaxrl.losses import cross_entropy, dft, objective, token_mean
from jaxrl.training.mirror import mirrored
from jaxrl.training.supervised.fit import (
    FitResult,
    Task,
    check_resumable,
    end_notes,
    fit,
    look_notes,
    too_long_note,
)

_PROMPT = (
    "data.prompt_key, or data.prompt_key = 'none' and data.completion_key if a column holds whole "
    "conversations, or data.text_key if one holds whole texts"
)


class Texts(NamedTuple):
    """Tokenised texts."""

    sequences: Sequence[Rollout]  # `completion` ends as `completion_encoder` ends it
    too_long: int  # number of texts that were dropped


@mirrored
def finetune(config: SFTConfig, *, fork: str | None = None) -> FitResult:
    """Trains a model on texts; raises as `fit`, and ValueError for bad data or model."""
    start = check_resumable(config, fork=fork)
    checkpoint = find_trained(config)
    texts = Texts([], 0)
    if Hosts().leads:
        texts = load_texts(config.data, checkpoint.tokenizer, max_tokens=config.train.row_length)
    setup = set_up(config, checkpoint)
    shape = supervised_shape(config, sizes=setup.model.config, layout=setup.layout)

    loss = dft() if config.loss.name == "dft" else cross_entropy()

    def pack(sequences: Sequence[Rollout]) -> Minibatch:
        return pack_minibatch(sequences, [0.0] * len(sequences), shape=shape)

    task = Task(
        title="sft",
        setup=setup,
        learner=make_learner(
            setup.model,
            objective(loss, token_mean),
            optimizer=setup.optimizer.transformation,
            precision=config.precision,
            param_shardings=setup.param_shardings,
        ),
        rows=texts.sequences,
        pack=pack,
        fork=start,
        lengths=array("q", (one.length for one in texts.sequences)),
        notes=too_long_note("data.path", texts.too_long, config=config),
        details=[
            *look_notes(checkpoint.tokenizer, texts.sequences),
            *end_notes(setup, _rendering(config.data)),
        ],
    )
    return fit(config, task)


def load_texts(config: SFTDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Texts:
    """Reads texts; tokenizes prompt and completion separately, as in sampling.

    Raises:
      ValueError: for a row that lacks a key, a tokenizer without an end-of-sequence token, or if
        every text is too long; the message names file, line and key.
    """
    rendered = _rendering(config)
    render, encode = make_renderer(tokenizer, rendered), prompt_encoder(tokenizer, rendered)
    finish, start = completion_encoder(tokenizer, rendered), start_tokens(tokenizer)
    longest = most_characters(tokenizer, max_tokens)

    def read(row: Row) -> Sequence[tuple[str, str]]:
        where, record = row
        if config.text_key is not None:
            return [("", read_text(record, config.text_key, where=where, setting="data.text_key"))]
        before = None
        if config.prompt_key is not None:
            before = read_prompt(record, config.prompt_key, where=where, setting=_PROMPT)
        given = read_prompt(
            record, config.completion_key, where=where, setting="data.completion_key"
        )
        tools = read_tools(record, where=where)
        if isinstance(given, str) and before is not None:
            return [(render(before, where, tools=tools), given)]
        prompt, answer = _parted(before, given, where=f"{where}: {config.completion_key!r}")
        return list(render.turns(prompt, answer, where, tools=tools))

    short, too_long = Spool[Rollout](), 0
    rows = read_data(config.path, key="data.path")
    pieces = ((row, texts) for row in rows for texts in read(row))
    for one_row, texts in pieces:
        if sum(map(len, texts)) > longest:
            too_long += 1
            continue
        prompt, completion = encode(texts[0]), finish(texts[1])
        if config.text_key is not None:
            whole = completion if completion[: len(start)] == start else [*start, *completion]
            first = max(1, len(start))
            prompt, completion = whole[:first], whole[first:]
        if not (prompt and completion):
            raise ValueError(f"{one_row.where}: no token to predict the text from")
        one = given_rollout(prompt, completion)
        if one.length > max_tokens:
            too_long += 1
        else:
            short.append(one)
    if not short:
        raise ValueError(
            f"{config.path}: no text is left; each of the {too_long} has more than {max_tokens} "
            "tokens; raise train.row_length"
        )
    return Texts(short, too_long)


def _rendering(config: SFTDataConfig) -> Rendering:
    """Returns the rendering of the prompts; no template renders the texts of `data.text_key`."""
    return rendering(config) if config.text_key is None else Rendering(template="text")


def _parted(
    prompt: RawPrompt | None, given: RawPrompt, *, where: str
) -> tuple[RawPrompt, list[Message]]:
    """Returns the prompt and the messages after it. `given` is a message of the assistant, or
    without a `prompt` a whole conversation."""
    if isinstance(given, str):
        raise ValueError(f"{where} is a text; with data.prompt_key = 'none' write messages")
    said = [i for i, message in enumerate(given) if message["role"] == "assistant"]
    if prompt is not None:
        if len(given) != 1 or not said:
            raise ValueError(
                f"{where} has {len(given)} messages, expected one of the assistant; set "
                "data.prompt_key = 'none' if they are a whole conversation"
            )
        return prompt, given
    if not said or said[0] == 0:
        raise ValueError(f"{where} has no message of the assistant after another one")
    return given[: said[0]], given[said[0] : said[-1] + 1]
