"""`jaxrl sft`: fine-tunes a model on texts."""

from collections.abc import Sequence

from jaxrl.commands import options
from jaxrl.sft_config import SFTConfig

DESCRIPTION = """Fine-tunes a model on texts: cross-entropy over completion tokens, packed.

  jaxrl sft --model.path DIR --data.path texts.jsonl --run_dir runs/sft"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = options.parser_with_file("sft", SFTConfig, description=DESCRIPTION)
    config = options.parse(made, SFTConfig, argv).config

    from jaxrl.sft import finetune  # after --help and the config's errors: it takes seconds

    result = finetune(config)
    if result.signum is not None:
        print(f"ended by signal {result.signum} at step {result.step}; nothing is saved")
        return 128 + result.signum
    print(f"loss {result.loss:.4f} nats per token; model: {result.model}")
    return 0
