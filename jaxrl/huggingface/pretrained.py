"""A checkpoint as one value: the model, its parameters and its tokenizer, loaded and saved."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl.core.precision import DType, Precision
from jaxrl.huggingface import hub, saving
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
      source: the checkpoint that it was loaded from.
    """

    model: Model
    params: Params
    tokenizer: Any
    stop: tuple[tuple[int, ...], ...]
    source: Checkpoint


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
    return Pretrained(decoder(checkpoint.config), params, checkpoint.tokenizer, stop, checkpoint)


def save(
    base: Pretrained, params: Params, directory: str | Path, *, dtype: DType | None = None
) -> None:
    """Writes trained parameters as a checkpoint for transformers and vLLM, with the tokenizer and
    the generation settings of the model that they were trained from.

    Args:
      base: the model before training, from `load`.
      params: its parameters now, on any devices; `LearnerState.params`.
      directory: created if it does not exist; not the one that `base` was loaded from.
      dtype: dtype to cast tensors to; None writes `params` in their own.

    Raises:
      ValueError: if `params` are not parameters of `base`, or `directory` is the one that `base`
        was loaded from; the message names the parameter or the directory.
    """
    target = Path(directory)
    if target.resolve() == base.source.directory.resolve():
        raise ValueError(f"{target}: the model was loaded from this directory; save to another")
    written = jax.tree.leaves(params)[0].dtype if dtype is None else dtype
    saving.save(target, params, base.model.config, dtype=written, source=base.source)
