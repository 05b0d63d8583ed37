"""Loads prompts and builds sampling parameters from a config."""

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxrl import data
from jaxrl.config.data import DataConfig, PromptConfig
from jaxrl.config.doctor import DoctorDataConfig
from jaxrl.config.sampler import SamplingConfig
from jaxrl.core import most_kept
from jaxrl.data import Prompts, Rendering, Row, Tokenizer
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import SamplingParams, StopTexts, check_recorded

_SILENCE = 10.0  # seconds


def rendering(config: PromptConfig) -> Rendering:
    """Returns the rendering of prompts as text."""
    return Rendering(
        config.template,
        config.system_prompt,
        config.prompt_format,
        template_kwargs=config.template_kwargs,
    )


def read_data(path: str, *, key: str, split: str = "train") -> Iterator[Row]:
    """Yields the rows of the data under the config's key, as `data.read_rows`. Reading and
    tokenising many takes minutes; a line on standard error says every 10 seconds how far it is."""
    began = told = 0.0
    for number, row in enumerate(data.read_rows(path, split=split, key=key)):
        now = time.monotonic()
        if number == 0:
            began = told = now
        elif now - told > _SILENCE:
            told, seconds = now, now - began
            line = f"{key}: {number:,} rows in {seconds:.0f} s; all are read before the first step"
            print(line, file=sys.stderr, flush=True)
        yield row


def load_prompts(
    config: DataConfig | DoctorDataConfig,
    tokenizer: Tokenizer,
    *,
    rows: Iterator[Row],
    tools: Iterable[Mapping[str, Any]] = (),
    limit: int | None = None,
) -> Prompts:
    """Loads the prompts in rows of data, rendered with the schemas of tools; raises as
    `data.load_prompts`."""
    return data.load_prompts(
        rows,
        tokenizer,
        prompt_key=config.prompt_key,
        answer_key=config.answer_key if isinstance(config, DataConfig) else None,
        rendering=rendering(config)._replace(tools=tuple(tools)),
        max_tokens=config.max_prompt_tokens,
        limit=limit,
    )


def sampling_params(config: SamplingConfig, checkpoint: Checkpoint, *, seed: int) -> SamplingParams:
    """Builds sampling parameters. Completions end at the end-of-sequence tokens of the model and
    of the tokenizer, at the chat template's end of a turn, and at the texts of `sampling.stop`."""
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=tuple((end,) for end in checkpoint.end_ids),
        stop_texts=StopTexts(checkpoint.tokenizer, config.stop) if config.stop else None,
        seed=seed,
    )


def training_params(config: SamplingConfig, checkpoint: Checkpoint, *, seed: int) -> SamplingParams:
    """Builds the parameters that rollouts are sampled with: truncated sampling keeps at most as
    many tokens as a record names, because the learner normalises over them.

    Raises:
      ValueError: if `sampling.top_k` is larger.
    """
    params = sampling_params(config, checkpoint, seed=seed)
    vocab_size = checkpoint.config.vocab_size
    if params.truncated and not params.top_k:
        params = dataclasses.replace(params, top_k=most_kept(vocab_size))
    try:
        check_recorded(params, vocab_size)
    except ValueError as error:
        raise ValueError(f"[sampling] {error}, or leave it out") from None
    return params
