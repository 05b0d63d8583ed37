"""Loading of a checkpoint directory: the model, its parameters and its tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.core.precision import Precision
from jaxrl.huggingface import hub
from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.models.model import Model, decoder
from jaxrl.models.spec import Params


class Pretrained(NamedTuple):
    """A language model on one device.

    Attributes:
      model: pure functions from tokens to hidden states and logits.
      params: the model's parameters, in `precision.params`.
      tokenizer: a `transformers.PreTrainedTokenizerBase`.
      stop: token sequences that end a completion, for `SamplingParams`.
    """

    model: Model
    params: Params
    tokenizer: Any
    stop: tuple[tuple[int, ...], ...]


def load(directory: str | Path, *, precision: Precision | str = "fp32") -> Pretrained:
    """Loads a language model from a Hugging Face checkpoint directory, or from the hub.

    Args:
      directory: holds config.json, model.safetensors (or shards) and the tokenizer's files; or a
        name on the hub, see `hub.local_directory`.
      precision: the dtype policy or its text; parameters are cast to `precision.params`.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if the directory does not exist, its files do not fit together, or it holds a
        reward model; the message names the file or tensor.
    """
    checkpoint = Checkpoint(hub.local_directory(str(directory)))
    stop = tuple((end,) for end in checkpoint.end_ids)
    params = checkpoint.load(dtype=Precision.of(precision).params)
    if checkpoint.config.scored:
        raise ValueError(f"{directory} is a reward model; a causal language model is required")
    return Pretrained(decoder(checkpoint.config), params, checkpoint.tokenizer, stop)
