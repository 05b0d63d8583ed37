"""Loads prompts and builds sampling parameters from a config."""

from collections.abc import Iterable, Iterator

from jaxrl import data
from jaxrl.config.data import DataConfig, PromptConfig
from jaxrl.config.doctor import DoctorDataConfig
from jaxrl.config.sampler import SamplingConfig
from jaxrl.data import Prompts, Rendering, Row, Tokenizer
from jaxrl.environments import Tool
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import SamplingParams, StopTexts


def rendering(config: PromptConfig) -> Rendering:
    """Returns the rendering of prompts as text."""
    return Rendering(
        config.template,
        config.system_prompt,
        config.prompt_format,
        template_kwargs=config.template_kwargs,
    )


def load_prompts(
    config: DataConfig | DoctorDataConfig,
    tokenizer: Tokenizer,
    *,
    rows: Iterator[Row],
    tools: Iterable[Tool] = (),
    limit: int | None = None,
) -> Prompts:
    """Loads the prompts in rows of data, rendered with the tools; raises as `data.load_prompts`."""
    return data.load_prompts(
        rows,
        tokenizer,
        prompt_key=config.prompt_key,
        answer_key=config.answer_key if isinstance(config, DataConfig) else None,
        rendering=rendering(config)._replace(tools=tuple(tool.schema for tool in tools)),
        max_tokens=config.max_prompt_tokens,
        limit=limit,
    )


def sampling_params(config: SamplingConfig, checkpoint: Checkpoint, *, seed: int) -> SamplingParams:
    """Builds sampling parameters. Completions end at the end-of-sequence tokens of the model and
    of the tokenizer, at the chat template's end of a turn, and at the texts of `sampling.stop`."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        stop=tuple((end,) for end in checkpoint.end_ids),
        stop_texts=StopTexts(checkpoint.tokenizer, config.stop) if config.stop else None,
        seed=seed,
    )
