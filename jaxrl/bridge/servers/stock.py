"""Client of a vLLM server without jaxrl's engine, which takes adapters and no weights.

Any vLLM with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is one, also on a TPU. It keeps
the base model that it was started with, belongs to no learner, and may serve several.
"""

from pathlib import PurePath

from jaxrl.bridge.base import LearnerIdentity
from jaxrl.bridge.servers.control import VllmServer


class StockServer(VllmServer):
    """A server whose base is checked, not published."""

    shared = True
    _advice = (
        "start it with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; if "
        "it does not see this directory, set sampler.store = 'file://DIRECTORY' to one that it has "
        "under the same path"
    )
    _base = ""  # its name for the base model
    _passed = ""  # of the check that its base has passed
    _adapter = ""  # the last that it has loaded

    @property
    def base(self) -> str:
        """Its name for the base model; "" before it has answered."""
        return self._base

    def connect(
        self,
        *,
        root: str,
        wire: str,
        sampler: str,
        logits: str,
        learner: LearnerIdentity,
        blocks: str = "none",
    ) -> None:
        """Does nothing: the server knows no learner and no directory of payloads."""

    def disconnect(self) -> None:
        """Does nothing more than to forget the server's state."""
        self.connected = False

    def serves(self, label: str) -> bool:
        """Tells whether the server has passed the check `label` and has not restarted since."""
        with self._tracked():
            found = self.models(quickly=not self.connected)
            if not self.version:
                self._read_version()
        self._base = next(model["id"] for model in found if model.get("parent") is None)
        if self._adapter and self._adapter not in [model["id"] for model in found]:
            self._passed = self._adapter = ""  # it has restarted, maybe with another base
        self.connected = self._passed == label
        return self.connected

    def accept(self, label: str) -> None:
        """Records that the base model has passed the check `label`."""
        self._passed = label

    def load_adapter(self, name: str, directory: PurePath) -> None:
        """Loads an adapter as `VllmServer.load_adapter` does."""
        super().load_adapter(name, directory)
        self._adapter = name
