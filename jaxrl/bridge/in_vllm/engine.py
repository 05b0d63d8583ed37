"""Weight-transfer engine of the bridge; runs inside vLLM and never imports jax.

`plugin` registers it for `--weight-transfer-config '{"backend": "jaxrl"}'`. One call of
`update_weights` checks the whole manifest, then opens, loads and closes the model. So no forward
pass sees a half-loaded model, paused or not, and a refused payload changes nothing. The workers of
a server that is cut over devices, each with an engine, go on together or not at all.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import INT8, NOT_CONNECTED, POISONED, REFUSED, TensorSpec
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.in_vllm.ownership import Ownership
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.payload import MappedTensor
from jaxrl.bridge.safetensors_file import read_specs

_LOGPROBS = "processed_logprobs"  # after the temperature; vLLM's default is before
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_SHOWN = 500  # characters of an error
_CORRECTION = ".e_score_correction_bias"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Announcement of a learner that connects."""

    root: str  # directory of all payloads; "" for the directory of this host's agent
    wire: str  # dtype of all tensors, such as "bfloat16"
    sampler: str  # dtype that the learner expects this server to compute in
    logits: str  # dtype that it expects the head to compute in
    learner: dict[str, str]  # fields of `LearnerIdentity`
    blocks: str = "none"  # form of the operands that it expects, as `blocks` of a precision
    sleeps: bool = False  # the learner will make the server sleep, for its memory


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Announcement of one payload."""

    payload: str  # directory, relative to the root
    version: int  # as in the manifest
    learner: dict[str, str]  # as in the manifest


class BridgeEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads payloads into the model by vLLM's layerwise reload."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _root: Path | None = None
    _version = -1
    _expected: tuple[TensorSpec, ...] = ()
    _loaded = _unnamed = False  # unnamed: vLLM does not report the version of these weights yet

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Begins without a learner; the arguments are vLLM's."""
        super().__init__(*args, **kwargs)
        self._ownership = Ownership()

    def parse_init_info(self, init_dict: Any) -> InitInfo:
        """Parses the body of a request; raises ValueError with `REFUSED`."""
        with _refusing("connecting"):
            return InitInfo(**init_dict)

    def parse_update_info(self, update_dict: Any) -> UpdateInfo:
        """Parses the body of a request; raises ValueError with `REFUSED`."""
        with self._unchanged("the update"):
            return UpdateInfo(**update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connects a learner, which may start at any version.

        Raises ValueError with `REFUSED` if another learner is connected, the dtypes of the model
        or of its head or the operands' form disagree, the server reports log-probs before the
        temperature or would keep its memory asleep, the root is not a directory, or the model was
        not loaded from a local safetensors checkpoint.
        """
        with _refusing("connecting"), _together():
            learner = manifest.parse_learner(init_info.learner)
            self._ownership.check(learner)
            root = self._checked_root(init_info)
            expected = self._model_specs(init_info.wire)
        self._expected, self._root, self._version = expected, root, -1
        self._ownership.take(learner)

    def _checked_root(self, init_info: InitInfo) -> Path:
        served = str(self.model_config.dtype).removeprefix("torch.")
        if init_info.sampler != served:
            raise ValueError(
                f"the server computes in {served} and the learner expects "
                f"{init_info.sampler}; start it with --dtype {init_info.sampler} or set "
                "precision.sampler"
            )
        self._check_blocks(init_info.blocks)
        self._check_head(init_info.logits)
        if (mode := self.model_config.logprobs_mode) != _LOGPROBS:
            raise ValueError(
                f"the server reports {mode}, not those of the sampling distribution; "
                f"start it with --logprobs-mode {_LOGPROBS}, or with jaxrl serve and without "
                "--logprobs-mode in sampler.vllm_args"
            )
        if init_info.sleeps and not (
            self.model_config.enable_sleep_mode or current_platform.is_cpu()
        ):
            raise ValueError(
                "the server would keep its memory while it sleeps (sampler.sleep); start it with "
                "--enable-sleep-mode"
            )
        if init_info.wire not in manifest.ITEM_BYTES:
            raise ValueError(f"unknown wire dtype {init_info.wire!r}")
        root = Path(init_info.root or relay.agent_directory()).resolve()
        if not root.is_dir():
            raise ValueError(f"the server finds no directory {root}")
        return root

    def _check_blocks(self, blocks: str) -> None:
        served = "int8" if self.model_config.quantization == INT8 else "none"
        if served != blocks:
            raise ValueError(
                f"the server computes with blocks={served} and the learner with blocks={blocks}; "
                f"start it with jaxrl serve --blocks {blocks}, or train with blocks={served} in "
                "precision"
            )
        if served == "int8" and not current_platform.is_cpu():
            raise ValueError(
                "blocks=int8 is served on CPUs only; serve without --quantization "
                f"{INT8}, and train without blocks"
            )
        if served == "int8" and (size := self.parallel_config.tensor_parallel_size) > 1:
            raise ValueError(
                f"--tensor-parallel-size {size} with blocks=int8: each worker would round its "
                "part of a row alone; serve with --tensor-parallel-size 1"
            )
        if served == "int8" and not self._sums_int8():
            raise ValueError(
                "blocks=int8: vLLM's sums of int8 are wrong on this processor; serve on one with "
                "avx512_vnni or AMX, or train without blocks"
            )

    def _sums_int8(self) -> bool:
        from jaxrl.bridge.in_vllm.int8 import sums_are_exact  # imports layers, see `quantization`

        return sums_are_exact()

    def _check_head(self, logits: str) -> None:
        """Compares the dtype of the model's heads, because not every model reads the option."""
        for module in self.model.modules():
            if isinstance(module, LogitsProcessor):
                served = str(module.head_dtype or self.model_config.dtype).removeprefix("torch.")
                if served != logits:
                    raise ValueError(
                        f"the server's head computes in {served} and the learner's logits are "
                        f"{logits}; start the server with --hf-overrides "
                        f'\'{{"head_dtype": "{logits}"}}\' (jaxrl serve has --logits for it), or '
                        f"train with logits={_SHORT.get(served, served)} in precision"
                    )

    def start_weight_update(self) -> None:
        """Does nothing: the model is opened after the payload is checked."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Checks a payload, then loads it.

        Raises:
          ValueError: with `REFUSED` if the payload is refused; the model is unchanged.
          RuntimeError: with `POISONED` if loading failed or the payload was written to during the
            load, so that the weights may be mixed. Also if the payload is refused and an earlier
            publish has left weights without a version.
        """
        with self._unchanged(f"version {_shown(update_info.version)}"), _together():
            directory = self._directory(update_info)
            generation = manifest.generation(directory)
            tensors = self._checked(directory, update_info.version)
        self._loaded, self._unnamed = False, True
        try:
            with _together():
                self._load(tensors)
                if manifest.generation(directory) != generation:
                    raise ManifestError(f"{directory} was written to during the load")
        except Exception as error:
            raise RuntimeError(
                f"{POISONED} loading version {update_info.version} failed halfway: {_shown(error)}"
            ) from error
        self._version, self._loaded = update_info.version, True

    def finish_weight_update(self) -> None:
        """Records that vLLM gives the weights their version. It must not fail, because that would
        leave vLLM's session open forever."""
        if self._loaded:
            self._loaded = self._unnamed = False

    def shutdown(self) -> None:
        """Disconnects the learner."""
        self._root = None
        self._ownership.release()

    @contextmanager
    def _unchanged(self, what: str) -> Iterator[None]:
        """Refuses for any error in the block, which changes no weight."""
        try:
            with _refusing(what):
                yield
        except ValueError as error:
            if self._unnamed:
                raise RuntimeError(
                    f"{POISONED} an earlier publish did not finish, and this one changed nothing: "
                    f"{str(error).removeprefix(REFUSED).strip()}"
                ) from error
            raise

    def _directory(self, update_info: UpdateInfo) -> Path:
        if self._root is None:
            raise ValueError(NOT_CONNECTED)
        learner = manifest.parse_learner(update_info.learner)
        self._ownership.require(learner)
        return payload.resolve(self._root, update_info.payload)

    def _checked(self, directory: Path, version: int) -> list[MappedTensor]:
        content = manifest.read(directory)
        self._ownership.require(content.learner)
        if content.version != version:
            raise ValueError(f"the manifest has version {content.version}")
        if content.version < self._version:
            raise ValueError(f"older than version {self._version}, which the server holds")
        manifest.check_tensors(content.entries, self._expected)
        return payload.open_tensors(directory, content.entries)

    def _load(self, tensors: list[MappedTensor]) -> None:
        with _opened(self.model, self.model_config):
            self.model.load_weights(itertools.chain.from_iterable(map(_divided, tensors)))
        if sinks := [tensor for tensor in tensors if tensor.entry.name.endswith(".sinks")]:
            # Their loader bypasses the functions that the reload watches.
            self.model.load_weights(map(_to_torch, sinks))
            _renew_sinks(self.model)
        for module in self.model.modules():
            if self._tied and isinstance(module, ParallelLMHead):
                # A tied head gets no weights itself and would keep its packed copy of the old ones.
                module.quant_method.process_weights_after_loading(module)

    @property
    def _tied(self) -> bool:
        return self.model_config.hf_config.tie_word_embeddings

    def _model_specs(self, wire: str) -> tuple[TensorSpec, ...]:
        try:
            specs = read_specs(Path(self.model_config.model))
        except ValueError as error:
            raise ValueError(f"{error}; serve a local checkpoint directory") from error
        # The learner has no second copy of a tied head, no layers for multi-token prediction and no
        # vision layers. It keeps the corrections of routers in f32.
        left_out = "lm_head.weight" if self._tied else None
        layers = self.model_config.hf_text_config.num_hidden_layers
        behind = (f"model.layers.{layers}.", "mtp.", "model.visual.")
        return tuple(
            spec._replace(dtype="float32" if spec.name.endswith(_CORRECTION) else wire)
            for spec in specs
            if spec.name != left_out and not spec.name.startswith(behind)
        )


@contextmanager
def _opened(model: torch.nn.Module, model_config: ModelConfig) -> Iterator[None]:
    """Opens the model for vLLM's layerwise reload and closes it afterwards. After an error every
    layer has its old or its new weights, so the engine survives until a complete payload comes."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            # Otherwise the new experts are not repacked and the kernel keeps using the old ones.
            method.moe_kernel = None
    initialize_layerwise_reload(model)
    try:
        yield
    except BaseException:
        for module in model.modules():
            info = get_layerwise_info(module)
            info.loaded_weights.clear()
            info.load_numel = 0  # counts as not loaded, so its old tensors are restored
        raise
    finally:
        finalize_layerwise_reload(model, model_config)


@contextmanager
def _together() -> Iterator[None]:
    """Raises ValueError if the block fails in another worker of the server: a worker that goes on
    alone would mix its weights with the others' old ones."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    others = _in_others("" if error is None else str(error) or repr(error))
    if error is not None:
        raise error
    if others:
        raise ValueError(f"another worker of the server: {others}")


def _in_others(text: str) -> str:
    """Returns the first text that is not empty of all workers that hold a part of the model."""
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            found = [""] * group.world_size
            torch.distributed.all_gather_object(found, text, group=group.cpu_group)
            text = next(filter(None, found), "")
    return text


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raises ValueError with `REFUSED` for any error in the block."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else _shown(error)
        raise ValueError(f"{REFUSED} {what}: {text[:_SHOWN]}") from error


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_SHOWN]
    except Exception:  # such as an integer of too many digits
        return f"a {type(value).__name__}"


def _renew_sinks(model: torch.nn.Module) -> None:
    """Copies attention sinks to the backends, some of which hold them in another dtype."""
    for module in model.modules():
        held = getattr(getattr(getattr(module, "attn", None), "impl", None), "sinks", None)
        if held is not None:
            held.data.copy_(module.sinks.data)


def _divided(tensor: MappedTensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a tensor; gpt-oss's experts one by one, because its loader passes only single experts
    to the functions that the reload watches."""
    name, whole = _to_torch(tensor)
    layer, experts, kind = name.partition(".mlp.experts.")
    if not experts or "." in kind:
        yield name, whole
        return
    for i, one in enumerate(whole):
        yield f"{layer}{experts}{i}.{kind}", one


def _to_torch(tensor: MappedTensor) -> tuple[str, torch.Tensor]:
    entry = tensor.entry
    flat = torch.from_numpy(tensor.data).view(getattr(torch, entry.dtype))
    return entry.name, flat.view(entry.shape)
