"""Runs inside vLLM: receives weights from the bridge. Imports torch and vllm, and never jax.

`vllm_plugin` makes it known as `--weight-transfer-config '{"backend": "jaxrl"}'`. Everything
happens within one call of `update_weights`: the whole payload is checked first, then the model is
opened, loaded and closed. So no forward pass ever sees a half-loaded model, paused or not, and a
refused payload changes nothing.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import POISONED, REFUSED, STRANGER, TensorSpec
from jaxrl.bridge.payload import Mapped
from jaxrl.bridge.safetensors_file import read_specs

_LOGPROBS = "processed_logprobs"  # after the temperature; vLLM's default is before it


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a learner says when it connects.

    Attributes:
      root: directory below which all payloads lie.
      wire: dtype of all tensors, such as "bfloat16".
      sampler: dtype that the learner believes this server computes in.
    """

    root: str
    wire: str
    sampler: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One payload.

    Attributes:
      payload: its directory, relative to the root.
      version: the version that its manifest must have.
    """

    payload: str
    version: int


class BridgeEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads payloads into the model through vLLM's layerwise reload."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _root: Path | None = None
    _version = -1
    _expected: tuple[TensorSpec, ...] = ()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Learns where payloads come from. A learner that starts again may start at any version.

        Raises:
          ValueError: if the dtypes disagree, the server reports other log-probs than those it draws
            from, the root is not a directory, or the model was not loaded from a local checkpoint
            whose tensors can be listed.
        """
        served = str(self.model_config.dtype).removeprefix("torch.")
        if init_info.sampler != served:
            raise ValueError(
                f"{REFUSED} the server computes in {served} and the learner expects "
                f"{init_info.sampler}; start it with --dtype {init_info.sampler} or set "
                "precision.sampler"
            )
        if (mode := self.model_config.logprobs_mode) != _LOGPROBS:
            raise ValueError(
                f"{REFUSED} the server reports {mode}, which are not those of the distribution it "
                f"draws from; start it with --logprobs-mode {_LOGPROBS}, or with jaxrl serve and "
                "without --logprobs-mode in sampler.vllm_args"
            )
        if init_info.wire not in manifest.ITEM_BYTES:
            raise ValueError(f"{REFUSED} unknown wire dtype {init_info.wire!r}")
        root = Path(init_info.root).resolve()
        if not root.is_dir():
            raise ValueError(f"{REFUSED} the server finds no directory {root}")
        self._expected = self._model_specs(init_info.wire)
        self._root, self._version = root, -1

    def start_weight_update(self) -> None:
        """Nothing: the model is opened when all is checked."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Checks a payload, then loads it.

        Raises:
          ValueError: with `REFUSED` in it if the payload was refused; the model is untouched.
          RuntimeError: with `POISONED` in it if loading failed and the weights are mixed.
        """
        try:
            tensors = self._checked(update_info)
        except ValueError as error:
            raise ValueError(f"{REFUSED} version {update_info.version}: {error}") from error
        try:
            self._load(tensors)
        except Exception as error:
            raise RuntimeError(
                f"{POISONED} loading version {update_info.version} failed halfway: {error!r}"
            ) from error
        self._version = update_info.version

    def finish_weight_update(self) -> None:
        """Nothing: a failure here would leave vLLM's session open forever."""

    def shutdown(self) -> None:
        """Forgets the learner."""
        self._root = None

    def _checked(self, update_info: UpdateInfo) -> list[Mapped]:
        if self._root is None:
            raise ValueError(STRANGER)
        directory = payload.resolve(self._root, update_info.payload)
        content = manifest.read(directory)
        if content.version != update_info.version:
            raise ValueError(f"the manifest has version {content.version}")
        if content.version < self._version:
            raise ValueError(f"older than version {self._version}, which the server holds")
        manifest.check_tensors(content.entries, self._expected)
        tensors = payload.open_tensors(directory, content.entries)
        payload.check_bytes(tensors)
        return tensors

    def _load(self, tensors: list[Mapped]) -> None:
        with _opened(self.model, self.model_config):
            self.model.load_weights(map(_to_torch, tensors))
        heads = [m for m in self.model.modules() if isinstance(m, ParallelLMHead)]
        if self.model_config.hf_config.tie_word_embeddings:
            for module in heads:
                # It gets no weights of its own and would keep its packed copy of the old ones.
                module.quant_method.process_weights_after_loading(module)

    def _model_specs(self, wire: str) -> tuple[TensorSpec, ...]:
        try:
            specs = read_specs(Path(self.model_config.model))
        except ValueError as error:
            raise ValueError(f"{REFUSED} {error}; serve a local checkpoint directory") from error
        tied = self.model_config.hf_config.tie_word_embeddings
        return tuple(
            spec._replace(dtype=wire)
            for spec in specs
            if not (tied and spec.name == "lm_head.weight")
        )


@contextmanager
def _opened(model: torch.nn.Module, model_config: ModelConfig) -> Iterator[None]:
    """The model between `initialize_layerwise_reload` and `finalize_layerwise_reload`.

    After an error every layer is whole again, with its old or its new weights, so that the engine
    survives until a complete payload comes.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            # Else the new experts are not repacked and the kernel goes on with the old ones.
            method.moe_kernel = None
    initialize_layerwise_reload(model)
    try:
        yield
    except BaseException:
        for module in model.modules():
            info = get_layerwise_info(module)
            info.loaded_weights.clear()
            info.load_numel = 0  # counts as not loaded: its old tensors are put back
        raise
    finally:
        finalize_layerwise_reload(model, model_config)


def _to_torch(tensor: Mapped) -> tuple[str, torch.Tensor]:
    entry = tensor.entry
    flat = torch.from_numpy(tensor.data).view(getattr(torch, entry.dtype))
    return entry.name, flat.view(entry.shape)
