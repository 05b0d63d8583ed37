from . import hub as hub
from .checkpoint import Checkpoint as Checkpoint, load as load
from .config.convert import from_hf_config as from_hf_config, to_hf_config as to_hf_config
from .fingerprints import fingerprint as fingerprint
from .peft import (
    adapter_fingerprint as adapter_fingerprint,
    load_adapter as load_adapter,
    save_adapter as save_adapter,
)
from .saving import save as save, save_tensors as save_tensors
