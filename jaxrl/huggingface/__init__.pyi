from . import hub as hub
from .checkpoint import load as load, save as save, save_tensors as save_tensors
from .config.convert import from_hf_config as from_hf_config, to_hf_config as to_hf_config
from .config.file import is_quantised as is_quantised, load_config as load_config
from .peft import load_adapter as load_adapter, save_adapter as save_adapter
from .pretrained import Pretrained as Pretrained
from .tokenizer import (
    copy_tokenizer as copy_tokenizer,
    load_end_ids as load_end_ids,
    load_tokenizer as load_tokenizer,
)
