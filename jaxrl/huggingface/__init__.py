"""Checkpoints of the Hugging Face format, in and out."""

from jaxrl.huggingface.checkpoint import load as load
from jaxrl.huggingface.checkpoint import save as save
from jaxrl.huggingface.checkpoint import save_tensors as save_tensors
from jaxrl.huggingface.config.file import is_quantised as is_quantised
from jaxrl.huggingface.config.file import load_config as load_config
from jaxrl.huggingface.tokenizer import copy_tokenizer as copy_tokenizer
from jaxrl.huggingface.tokenizer import load_end_ids as load_end_ids
from jaxrl.huggingface.tokenizer import load_tokenizer as load_tokenizer
