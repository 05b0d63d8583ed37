"""Loads prompts and builds sampling parameters from a config."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxrl.config.sampler import SamplingConfig
from jaxrl.config.tables import DataConfig, PromptConfig
from jaxrl.data import prompts
from jaxrl.data.prompts import Prompts, Rendering, Tokenizer
from jaxrl.environments.tools.schema import Tool
from jaxrl.models import huggingface
from jaxrl.sampling.base import SamplingParams

NO_TOOLS: Mapping[str, Tool] = MappingProxyType({})


def rendering(config: PromptConfig) -> Rendering:
    """Returns how prompts are rendered as text."""
    return Rendering(config.template, config.system_prompt, config.prompt_format)


def load_training_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, tools: Mapping[str, Tool] = NO_TOOLS
) -> Prompts:
    """Loads the prompts of `data.path`, with the tools; raises as `prompts.load_prompts`."""
    return _load_prompts(
        config, tokenizer, tools=tools, path=config.path, split="train", limit=None
    )


def load_held_out_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, tools: Mapping[str, Tool] = NO_TOOLS
) -> Prompts | None:
    """Loads the prompts of `data.eval_path` in the same way; None without one."""
    if config.eval_path is None:
        return None
    return _load_prompts(
        config,
        tokenizer,
        tools=tools,
        path=config.eval_path,
        split="test",
        limit=config.eval_limit,
    )


def _load_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    tools: Mapping[str, Tool],
    path: str,
    split: str,
    limit: int | None,
) -> Prompts:
    return prompts.load_prompts(
        prompts.read_rows(path, split=split),
        tokenizer,
        prompt_key=config.prompt_key,
        answer_key=config.answer_key,
        rendering=rendering(config)._replace(tools=tuple(t.schema for t in tools.values())),
        max_tokens=config.max_prompt_tokens,
        limit=limit,
    )


def sampling_params(
    config: SamplingConfig, model_path: str, tokenizer: Tokenizer, *, seed: int
) -> SamplingParams:
    """Builds sampling parameters. Completions end at the end-of-sequence tokens of the model and
    of the tokenizer, and at the texts of `sampling.stop`."""
    ends = sorted({*huggingface.load_end_ids(model_path), tokenizer.eos_token_id} - {None})
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in config.stop]
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        stop=(*((int(end),) for end in ends), *(tuple(text) for text in texts)),
        seed=seed,
    )
