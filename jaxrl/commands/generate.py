"""Samples completions for prompts, given as arguments, as rows of data.path,
or as lines on standard input. They are printed in the order of the prompts.

  jaxrl generate "347+585=?" --greedy --model.path runs/latest/model
  jaxrl generate --data.path prompts.jsonl --out completions.jsonl --model.path DIR"""

import argparse
import dataclasses
import functools
import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import PositiveInt

from jaxrl import data
from jaxrl.builders.policy import open_policy
from jaxrl.builders.prompts import rendering, sampling_params
from jaxrl.builders.sampler import SamplerNeeds
from jaxrl.commands import options
from jaxrl.commands.paths import find_inputs
from jaxrl.config import toml_file
from jaxrl.config.data import PromptConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.sampler import SamplerConfig, SamplingConfig
from jaxrl.config.section import Section
from jaxrl.config.tables import BaseConfig, ModelConfig
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import Completion


class GenerateDataConfig(Section):
    """Prompts in rows of data."""

    path: str | None = None
    """Prompts in any form that `data.path` of `jaxrl train` has. Without it,
    prompts are arguments or lines on standard input."""

    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of {role, content} messages."""

    limit: PositiveInt | None = None
    """Read the first N rows; all of them if absent."""


class GenerateConfig(BaseConfig):
    """Sampling from a checkpoint."""

    model: ModelConfig
    data: GenerateDataConfig = GenerateDataConfig()
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    sampler: SamplerConfig = SamplerConfig()


class Asked(NamedTuple):
    """A prompt, as it was given."""

    where: str  # its place, for errors
    prompt: data.RawPrompt
    tools: Sequence[Any]  # that the row brings
    row: dict[str, Any]  # the columns that `--out` repeats

    @property
    def shown(self) -> str:
        """The text, or the content of the last message."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1]["content"])


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser("generate", GenerateConfig, description=__doc__, usage="[PROMPT ...]")
    made.add_argument("prompts", nargs="*", metavar="PROMPT")
    made.add_argument("--greedy", action="store_true", help="always take the most probable token")
    made.add_argument(
        "--samples", type=int, default=1, help="completions for each prompt (default: 1)"
    )
    made.add_argument(
        "--out",
        type=options.output,
        metavar="FILE.jsonl",
        help="write a line for each completion, with the columns of its row, instead of printing",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, arguments = options.parse_arguments(parser(), GenerateConfig, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that servers stop
    config = as_trained(find_inputs(config))
    asked = list(_asked(config, arguments.prompts))
    checkpoint = Checkpoint(config.model.path)
    tokenizer, positions = checkpoint.tokenizer, checkpoint.config.max_positions
    prompts = _tokenise(asked, tokenizer, config, positions=positions)
    tell = functools.partial(print, file=sys.stderr, flush=True)
    if (end := data.end_note(tokenizer, rendering(config.prompt))) is not None:
        tell(end)
    c, longest, shortened = config.sampling, max(map(len, prompts), default=0), 0
    sampling = dataclasses.replace(
        sampling_params(c, checkpoint, seed=config.seed),
        max_tokens=min(c.max_tokens, positions - longest),
        temperature=0.0 if arguments.greedy else c.temperature,
    )
    needs = SamplerNeeds(
        longest + sampling.max_tokens,
        c.max_batch,
        completions=min(config.sampler.max_requests, len(prompts)) * arguments.samples,
    )
    with (
        open_policy(
            checkpoint,
            config.sampler,
            mesh=MeshConfig(),
            precision=config.precision,
            needs=needs,
            note=tell,
        ) as sampler,
        # Last, so that a model that cannot be opened leaves an earlier file as it is.
        open(arguments.out, "w", encoding="utf-8") if arguments.out else nullcontext() as out,
    ):
        found = sampler.sample(prompts, sampling, group_size=arguments.samples)
        for completion in _in_order(found, samples=arguments.samples):
            text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
            one, reason = asked[completion.prompt_index], completion.finish_reason
            room = min(c.max_tokens, positions - len(prompts[completion.prompt_index]))
            shortened += reason != "stop" and sampling.max_tokens < room
            if out is not None:
                line = one.row | {"completion": text, "finish_reason": reason}
                print(json.dumps(line, ensure_ascii=False, default=str), file=out)
            else:
                note = f" [truncated at {sampling.max_tokens} tokens]" * (reason != "stop")
                print(f"{one.shown}\n{text}{note}\n", flush=True)
    if shortened:
        tell(
            f"{shortened} completions were cut at {sampling.max_tokens} tokens, though their "
            f"prompts leave room for more: the longest prompt has {longest} of the model's "
            f"{positions} tokens; complete it in a command of its own"
        )
    if arguments.out:
        tell(f"{len(prompts) * arguments.samples} completions: {arguments.out}")
    return 0


def _in_order(found: Iterable[Completion], *, samples: int) -> Iterator[Completion]:
    """Yields completions in the order of their prompts, each prompt's once it has all `samples`."""
    waiting: dict[int, list[Completion]] = {}
    due = 0
    for completion in found:
        waiting.setdefault(completion.prompt_index, []).append(completion)
        while len(waiting.get(due, ())) == samples:
            yield from sorted(waiting.pop(due), key=lambda one: one.sample_index)
            due += 1


def as_trained(config: GenerateConfig) -> GenerateConfig:
    """Returns the config with the prompts of the run that wrote the model to RUN/model, where the
    command line does not set them; says so on standard error."""
    directory = Path(config.model.path)
    file = directory.parent / "config.toml"
    if directory.name != "model" or not file.is_file():
        return config
    trained = toml_file.read_tree(file).get("data", {})
    plain, given = PromptConfig().model_dump(), config.prompt.model_dump(exclude_unset=True)
    open_keys = [key for key in plain if key in trained and key not in given]
    taken = {k: trained[k] for k in open_keys if trained[k] not in ("none", plain[k])}
    if not taken:
        return config
    shown = ", ".join(f"{key} = {toml_file.toml_text(value)}" for key, value in taken.items())
    print(f"prompts as in {file}: {shown}", file=sys.stderr, flush=True)
    prompt = toml_file.validate(PromptConfig, taken | given)
    return config.model_copy(update={"prompt": prompt})


def _asked(config: GenerateConfig, texts: Sequence[str]) -> Iterator[Asked]:
    """Yields the prompts: the arguments, the rows of data.path, or the lines of standard input.

    Raises:
      ValueError: for arguments beside data.path, as `read_rows` and `read_prompt`, or for a
        standard input that is empty or not UTF-8.
    """
    path, key = config.data.path, config.data.prompt_key
    if path is not None:
        if texts:
            raise ValueError(f"prompts as arguments, and data.path = {path!r}; give one of them")
        for where, row in islice(data.read_rows(path, key="data.path"), config.data.limit):
            prompt = data.read_prompt(row, key, where=where, setting="data.prompt_key")
            yield Asked(where, prompt, data.read_tools(row, where=where), row)
        return
    for number, text in enumerate(texts or _lines(), start=1):
        where = f"prompt {number} ({text[:40]!r}{'...' * (len(text) > 40)})"
        yield Asked(where, text, (), {"prompt": text})


def _lines() -> list[str]:
    if sys.stdin.isatty():
        print("prompts, one a line; Ctrl-D ends them:", file=sys.stderr, flush=True)
    try:
        found = [line.rstrip("\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None
    if not found:
        raise ValueError(
            "no prompts: give them as arguments, in data.path, or as lines on standard input"
        )
    return found


def _tokenise(
    asked: Sequence[Asked], tokenizer: data.Tokenizer, config: GenerateConfig, *, positions: int
) -> list[np.ndarray]:
    """Renders and tokenises prompts for a model with this number of positions.

    Raises:
      ValueError: for a prompt that is invalid text, is empty, or leaves the model no room for a
        completion; the message names it.
    """
    model, longest = config.model.path, positions - 1
    rendered = rendering(config.prompt)
    render = data.make_renderer(tokenizer, rendered)
    encode = data.prompt_encoder(tokenizer, rendered)
    characters, prompts = data.most_characters(tokenizer, longest), []
    for where, prompt, tools, _ in asked:
        shown = render(prompt, where, tools=tools)
        try:
            data.check_characters(shown)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        tokens = None
        if len(shown) <= characters:  # to tokenise megabytes takes minutes
            tokens = encode(shown)
        if tokens is None or len(tokens) > longest:
            size = f"{len(shown)} characters" if tokens is None else f"{len(tokens)} tokens"
            raise ValueError(
                f"{where} has {size}, and the model {model} takes {positions} tokens with the "
                "completion; shorten the prompt"
            )
        if not tokens:
            raise ValueError(
                f"{where} has no tokens with the tokenizer of {model}; write another prompt"
            )
        prompts.append(np.asarray(tokens, np.int32))
    return prompts
