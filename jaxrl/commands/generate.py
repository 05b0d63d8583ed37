"""`jaxrl generate`: samples completions for prompts."""

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np

from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.prompts import rendering, sampling_params
from jaxrl.commands import options
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.tables import BaseConfig, ModelConfig, PromptConfig, SamplingConfig
from jaxrl.core import precision
from jaxrl.data import prompts as data

DESCRIPTION = """Samples completions for prompts, given as arguments or as lines on standard input.

  jaxrl generate --model.path runs/latest/model --greedy "347+585=?" """


class GenerateConfig(BaseConfig):
    """Sampling from a checkpoint."""

    model: ModelConfig
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = options.parser("generate", GenerateConfig, description=DESCRIPTION, usage="[PROMPT ...]")
    made.add_argument("prompts", nargs="*", metavar="PROMPT")
    made.add_argument("--greedy", action="store_true", help="always take the most probable token")
    made.add_argument(
        "--samples", type=int, default=1, help="completions for each prompt (default: 1)"
    )
    config, arguments = options.parse(made, GenerateConfig, argv)
    texts = arguments.prompts or [line.rstrip("\n") for line in sys.stdin]

    from jaxrl.models import huggingface
    from jaxrl.sampling.embedded.sampler import EmbeddedSampler

    policy = precision.parse(config.precision)
    tokenizer = huggingface.load_tokenizer(config.model.path)
    render = data.renderer(tokenizer, rendering(config.prompt))
    prompts = [
        np.asarray(
            tokenizer.encode(render(text, where=f"prompt {i}"), add_special_tokens=False), np.int32
        )
        for i, text in enumerate(texts, start=1)
    ]
    layout = make_layout(MeshConfig())
    model, params = load_model(config.model.path, layout=layout, dtype=policy.params)
    sampler = EmbeddedSampler(model, params, precision=policy, max_batch=config.sampling.max_batch)
    sampling = sampling_params(config.sampling, config.model.path, tokenizer, seed=config.seed)
    if arguments.greedy:
        sampling = dataclasses.replace(sampling, temperature=0.0)
    for completion in sampler.sample(prompts, sampling, group_size=arguments.samples):
        text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        note = "" if completion.finish_reason == "stop" else " [truncated at sampling.max_tokens]"
        print(f"{texts[completion.prompt_index]}\n{text}{note}\n", flush=True)
    return 0
