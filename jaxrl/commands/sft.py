"""`jaxrl sft`: fine-tunes a model on texts."""

from collections.abc import Sequence

from jaxrl.commands import options, outcome
from jaxrl.config.sft import SFTConfig

DESCRIPTION = """Fine-tunes a model on texts: cross-entropy over completion tokens, packed; a run
found in run_dir is continued.

  jaxrl sft --model.path DIR --data.path texts.jsonl --run_dir runs/sft"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = options.parser_with_file("sft", SFTConfig, description=DESCRIPTION)
    config = options.parse(made, SFTConfig, argv).config

    # After --help and the config's errors: it takes seconds.
    from jaxrl.training.supervised.sft import finetune

    result = finetune(config)
    loss = result.last.get("loss", float("nan"))
    return outcome.report(result, f"loss {loss:.4f} nats per token")
