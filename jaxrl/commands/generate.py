"""Samples completions for prompts, given as arguments
or as lines on standard input.

  jaxrl generate "347+585=?" --greedy --model.path runs/latest/model"""

import argparse
import dataclasses
import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
from jaxrl.config.tables import BaseConfig, ModelConfig
from jaxrl.huggingface import Checkpoint


class GenerateConfig(BaseConfig):
    """Sampling from a checkpoint."""

    model: ModelConfig
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    sampler: SamplerConfig = SamplerConfig()


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser("generate", GenerateConfig, description=__doc__, usage="[PROMPT ...]")
    made.add_argument("prompts", nargs="*", metavar="PROMPT")
    made.add_argument("--greedy", action="store_true", help="always take the most probable token")
    made.add_argument(
        "--samples", type=int, default=1, help="completions for each prompt (default: 1)"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, arguments = options.parse_arguments(parser(), GenerateConfig, argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that servers stop
    texts = arguments.prompts or _lines()
    config = as_trained(find_inputs(config))
    checkpoint = Checkpoint(config.model.path)
    tokenizer, positions = checkpoint.tokenizer, checkpoint.config.max_positions
    prompts = _tokenise(texts, tokenizer, config, positions=positions)
    tell = functools.partial(print, file=sys.stderr, flush=True)
    if (end := data.end_note(tokenizer, rendering(config.prompt))) is not None:
        tell(end)
    c, longest = config.sampling, max(map(len, prompts), default=0)
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
    with open_policy(
        checkpoint,
        config.sampler,
        mesh=MeshConfig(),
        precision=config.precision,
        needs=needs,
        note=tell,
    ) as sampler:
        found = sampler.sample(prompts, sampling, group_size=arguments.samples)
        for completion in found:
            text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
            note = f" [truncated at {sampling.max_tokens} tokens]"
            if completion.finish_reason == "stop":
                note = ""
            print(f"{texts[completion.prompt_index]}\n{text}{note}\n", flush=True)
    return 0


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


def _lines() -> list[str]:
    try:
        return [line.rstrip("\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None


def _tokenise(
    texts: Sequence[str], tokenizer: data.Tokenizer, config: GenerateConfig, *, positions: int
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
    for number, text in enumerate(texts, start=1):
        where = f"prompt {number} ({text[:40]!r}{'...' * (len(text) > 40)})"
        shown = render(text, where)
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
