"""Size of a server's KV cache."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.bridge.servers.kv_cache_size import free_memory, kv_cache_size, token_bytes
from jaxrl.bridge.servers.launch import ServerOptions, _command
from jaxrl.builders.servers import starting_server
from jaxrl.config.sampler import SamplerConfig
from jaxrl.huggingface.config import convert
from tests import tiny
from tests.documented import ROOT

MIB = 1 << 20
OPTIONS = ServerOptions(python=Path("python"), dtype="bfloat16", max_model_len=4097)
QWEN3_8B = huggingface.Checkpoint(ROOT / "configs/models/qwen3_8b").config


def size(given, *, completions=1, free=64 << 30, **changes):
    options = dataclasses.replace(OPTIONS, kv_cache_bytes=given, **changes)
    return kv_cache_size(options, key="the.key", model=QWEN3_8B, completions=completions, free=free)


def test_bytes_per_token_of_a_real_model():
    assert token_bytes(QWEN3_8B, "bfloat16") == 147_456


def test_cache_holds_all_completions_if_memory_allows():
    block = 128 * 147_456
    one = 33 * block  # 4097 tokens
    assert size(None) == (one + block, None)  # vLLM reserves a block
    assert size(None, completions=16) == (16 * one + block, None)
    assert size(None, max_model_len=128) == (256 * MIB, None)
    nbytes, note = size(None, completions=256)
    assert nbytes == 16 << 30
    assert note is not None
    assert f"the.key = {nbytes} holds 27 completions of full length" in note
    assert "up to 256 at once" in note
    assert size(None, completions=256, free=one + block)[0] == one + block
    with pytest.raises(ValueError, match="up to 4097 tokens"):
        size(None, free=one)


def test_gpu_memory_is_left_to_vllm(tmp_path):
    assert size(None, device="cuda", completions=10**6) == (None, None)
    assert size(1 << 30, device="cuda", max_model_len=4096) == (1 << 30, None)
    for given, passed in ((None, False), (5, True)):
        options = dataclasses.replace(OPTIONS, kv_cache_bytes=given)
        assert ("--kv-cache-memory-bytes" in _command(tmp_path, options, 1)) is passed


def test_too_small_cache_names_the_key():
    with pytest.raises(ValueError, match=r"the\.key = 268435456 holds 1664 tokens, .*needs 4097"):
        size(256 * MIB)
    # Each of two devices holds half of a token.
    for arguments in (("--tensor-parallel-size", "2"), ("--tensor_parallel_size=2",), ("-tp", "2")):
        assert size(256 * MIB, arguments=arguments) == (256 * MIB, None)


def test_errors_come_before_a_server_starts(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(convert.to_hf_config(tiny.CONFIG, dtype="float32"))
    )
    (tmp_path / "python").touch()

    def start(**keys):
        config = SamplerConfig(python=str(tmp_path / "python"), **keys)
        with starting_server(
            config,
            huggingface.Checkpoint(tmp_path),
            dtype=np.dtype(np.float32),
            log=tmp_path / "log",
            note=print,
            max_model_len=128,
        ):
            pass

    with pytest.raises(ValueError, match=r"sampler\.kv_cache_bytes = 1000 holds 0 tokens"):
        start(kv_cache_bytes=1000)
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    content = convert.to_hf_config(tiny.GPT_OSS, dtype="bfloat16") | packed
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"is quantised .*write a copy in bf16"):
        start()
    (tmp_path / "python").unlink()
    with pytest.raises(FileNotFoundError, match=r"install_vllm\.sh .*sampler\.device = 'cuda'"):
        start()
    with pytest.raises(FileNotFoundError, match=r"pip install vllm==.*; .*makes one for the CPU"):
        start(device="cuda")


def test_free_memory_is_plausible():
    assert 0 < free_memory() < 1 << 50
