"""Reading of Hugging Face checkpoint directories: config, tokenizer and parameters.

Tensors are read one by one from memory-mapped files, bit for bit. Every tensor of a checkpoint is
used exactly once; a missing, surplus or misshapen one is an error that names it.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxrl.core.casts import dtype_of
from jaxrl.core.precision import DType
from jaxrl.data.ends import turn_end
from jaxrl.huggingface.config import convert
from jaxrl.huggingface.config.file import read_config
from jaxrl.huggingface.config.quantization import Block, quant_method, read_block
from jaxrl.huggingface.files import named, read_index, read_parameter, weight_files
from jaxrl.huggingface.fingerprints import fingerprint
from jaxrl.huggingface.tensors.names import checked_tensors
from jaxrl.huggingface.tokenizer import load_tokenizer, read_end_ids
from jaxrl.models import spec
from jaxrl.models.families import DecoderConfig
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import Params

# (path such as "layers/q", host array) -> array in its final place.
Put = Callable[[str, np.ndarray], Any]


class Checkpoint:
    """A model in a directory of the Hugging Face format. Everything is read on demand, config.json
    and the tokenizer only once. The saved states of a run are `jaxrl.learner.Checkpoints`."""

    def __init__(self, directory: str | Path, *, untied: bool = False) -> None:
        """Names a model. With `untied`, one whose output layer is its embedding gets an output
        layer of its own, with the same numbers."""
        self.directory, self._untied = Path(directory), untied

    @cached_property
    def content(self) -> dict[str, Any]:
        """The JSON object in config.json; raises as `read_config`."""
        return read_config(self.directory)

    @cached_property
    def config(self) -> DecoderConfig:
        """The decoder that config.json describes, with an output layer of its own if it is to be
        untied.

        Raises:
          ValueError: as `read_config` and `from_hf_config`; the message names the file.
        """
        return dataclasses.replace(self._stored, tied=False) if self.unties else self._stored

    @property
    def unties(self) -> bool:
        """True if the model differs from the stored one in its output layer."""
        return self._untied and self._stored.tied

    @cached_property
    def _stored(self) -> DecoderConfig:
        content = self.content
        with named(self.directory / "config.json"):
            return convert.from_hf_config(content)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, a `transformers.PreTrainedTokenizerBase`; raises as `load_tokenizer`."""
        return load_tokenizer(self.directory, vocab_size=self.config.vocab_size)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end a completion, sorted: the model's, the tokenizer's and
        the one that its chat template writes after a turn; raises as `read_end_ids`."""
        found = {*read_end_ids(self.directory, self.config), self.tokenizer.eos_token_id}
        if (end := turn_end(self.tokenizer)) is not None:
            found.add(end.token)
        return tuple(sorted(int(end) for end in found if end is not None))

    @cached_property
    def scorer_config(self) -> DecoderConfig:
        """The config of a reward model that starts from this checkpoint.

        Where config.json names no padding token it is the tokenizer's, or else its end token: the
        score is the one of the last other token, and transformers needs it for batches.
        """
        config = self.config
        if config.scored or config.pad_id is not None:
            return config.as_scorer()
        found = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        pad_id = next((token for token in found if token is not None), None)
        return dataclasses.replace(config.as_scorer(), pad_id=pad_id)

    @property
    def is_quantised(self) -> bool:
        """True if weights are in MXFP4 or FP8."""
        return quant_method(self.content) in ("mxfp4", "fp8")

    @property
    def block(self) -> Block | None:
        """Rows and columns of the blocks of FP8 weights; None in other formats. Raises as
        `read_block`."""
        with named(self.directory / "config.json"):
            return read_block(self.content)

    @property
    def dtype(self) -> DType | None:
        """The 16-bit dtype that config.json gives the weights; None for any other, or none."""
        outer, inner = self.content, self.content.get("text_config")
        for content in (outer, inner if isinstance(inner, dict) else {}):
            name = str(content.get("dtype") or content.get("torch_dtype"))
            if name in ("bfloat16", "float16"):
                return jnp.dtype(name)
        return None

    def fingerprint(self) -> dict[str, str]:
        """Returns digests of config.json and of the files of weights, as `fingerprint`; raises as
        `read_index`."""
        weights = weight_files(self.directory, read_index(self.directory))
        return fingerprint([self.directory / "config.json", *weights])

    def load(
        self,
        *,
        dtype: DType | None,
        put: Put = lambda path, array: jnp.asarray(array),
        scored: bool = False,
    ) -> Params:
        """Reads the parameters one by one, with the arguments and errors of `load`."""
        config = self.config
        named_as_read = dataclasses.replace(config, scored=True) if scored else config
        values: dict[str, Any] = {}
        with checked_tensors(self.directory, self._stored, block=self.block) as tensors:
            flat = spec.flatten(param_specs(named_as_read))
            if self.unties and not scored:
                flat["head"] = flat["head"]._replace(name=flat["embed"].name)
            for path, one in flat.items():
                if path == "score" and not config.scored:
                    value = np.zeros(one.shape, dtype or np.float32)
                else:
                    value = read_parameter(one, tensors, dtype=dtype and dtype_of(path, dtype))
                values[path] = put(path, value)
        return traverse_util.unflatten_dict(values, sep="/")


def load(
    directory: str | Path,
    *,
    dtype: DType | None,
    put: Put = lambda path, array: jnp.asarray(array),
    scored: bool = False,
) -> tuple[DecoderConfig, Params]:
    """Reads the config and the parameters of a checkpoint.

    Args:
      directory: holds config.json and model.safetensors or its shards and their index.
      dtype: dtype to cast parameters to; None keeps the files' dtype.
      put: places each parameter, for example on the devices of a mesh.
      scored: true for a reward model, a `transformers.AutoModelForSequenceClassification` with one
        label. The head of a language model is replaced by zeros, so that every text scores 0.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is corrupt, a tensor is missing, surplus or misshapen, or a dtype is not
        floating-point; the message names it. Also as `Checkpoint.config`.
    """
    checkpoint = Checkpoint(directory)
    params = checkpoint.load(dtype=dtype, put=put, scored=scored)
    return checkpoint.config.as_scorer() if scored else checkpoint.config, params
