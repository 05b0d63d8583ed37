"""Shows what a model reads: the rows that are kept, their lengths in tokens, the tokens that end a
completion, and a first row with all of its special tokens. Trained tokens stand in ⟦ ⟧. It accepts
the keys and the config file of `jaxrl train`, or of `jaxrl sft`, `dpo` and `reward-model` with the
options of these names. It reads the tokenizer, but no weights.

  jaxrl data configs/quickstart.toml
  jaxrl data --sft --model.path DIR --data.path texts.jsonl"""

import argparse
from collections.abc import Iterator, Sequence

from jaxrl import data
from jaxrl.builders.prompts import load_prompts, read_data
from jaxrl.commands import options
from jaxrl.commands.paths import fetch_models
from jaxrl.config.preference import DPOConfig, RewardModelConfig
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.training import Config
from jaxrl.data import length_line, marked_text
from jaxrl.environments import load_tools
from jaxrl.huggingface import Checkpoint

_SCHEMAS = {"--sft": SFTConfig, "--dpo": DPOConfig, "--reward-model": RewardModelConfig}
_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # of a checkpoint, without its weights

AnyConfig = Config | SFTConfig | DPOConfig | RewardModelConfig


def parser(schema: type[AnyConfig] = Config) -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser_with_file("data", schema, description=__doc__)
    for option in _SCHEMAS:
        made.add_argument(option, action="store_true", help=f"data of `jaxrl {option[2:]}`")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    schema = next((schema for option, schema in _SCHEMAS.items() if option in argv), Config)
    config = options.parse_arguments(parser(schema), schema, argv).config
    checkpoint = Checkpoint(fetch_models(config, files=_FILES).model.path)
    tokenizer = checkpoint.tokenizer
    is_task = isinstance(config, Config)
    for line in _prompts(config, tokenizer) if is_task else _texts(config, tokenizer):
        print(line)
    ends = [f"{tokenizer.decode([end])} ({end})" for end in checkpoint.end_ids]
    print(f"completions end at: {', '.join(ends)}")
    return 0


def _prompts(config: Config, tokenizer: data.Tokenizer) -> Iterator[str]:
    """Yields the lines about the prompts of `jaxrl train`."""
    tools, c = load_tools(config.environment.tools).values(), config.data
    rows = read_data(c.path, key="data.path")
    found = load_prompts(c, tokenizer, rows=rows, tools=[tool.schema for tool in tools])
    limit = f"data.max_prompt_tokens = {c.max_prompt_tokens}"
    yield f"{c.path}, {length_line('prompts', [len(one.tokens) for one in found.examples])}"
    yield f"dropped, because they have more tokens than {limit}: {found.too_long}"
    yield f"the first:\n\n{marked_text(tokenizer, found.examples[0].tokens)}\n"


def _texts(
    config: SFTConfig | DPOConfig | RewardModelConfig, tokenizer: data.Tokenizer
) -> Iterator[str]:
    """Yields the lines about the texts or pairs of a supervised run."""
    from jaxrl.training.supervised.pairs import tokenize  # these take seconds, so after --help
    from jaxrl.training.supervised.sft import load_texts

    path, most = config.data.path, config.train.row_length
    if isinstance(config, SFTConfig):
        texts = load_texts(config.data, tokenizer, max_tokens=most)
        lengths = [one.length for one in texts.sequences]
        kind, first = "texts", {"the first": texts.sequences[0]}
    else:
        rows = read_data(path, key="data.path")
        texts = tokenize(rows, tokenizer, config=config.data, max_tokens=most)
        lengths, pair = [one.length for one in texts.pairs], texts.pairs[0]
        kind, first = "pairs", {"the first, chosen": pair.chosen, "rejected": pair.rejected}
    yield f"{path}, {length_line(kind, lengths)}"
    yield f"dropped, because they have more tokens than train.row_length = {most}: {texts.too_long}"
    for name, one in first.items():
        yield f"{name}:\n\n{marked_text(tokenizer, one.prompt, one.completion)}\n"
