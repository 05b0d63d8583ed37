"""How much memory a server gets for keys and values."""

import json

import numpy as np
import pytest

from jaxrl.bridge.servers.kv_cache_size import free_memory, make_room, token_bytes
from jaxrl.bridge.servers.launch import ServerOptions, _command
from jaxrl.builders.servers import Workload, started_server
from jaxrl.config.sampler import SamplerConfig
from jaxrl.models import families, huggingface
from tests import tiny
from tests.documented import ROOT

MIB, BF16 = 1 << 20, np.dtype(np.float16)  # as wide
QWEN3_8B = huggingface.load_config(ROOT / "configs/models/qwen3_8b")


def room(given, **changes):
    asked = {"device": "cpu", "tokens": 4097, "answers": 1, "arguments": (), "free": 64 << 30}
    return make_room(given, key="the.key", model=QWEN3_8B, dtype=BF16, **asked | changes)


def test_a_token_of_a_real_model():
    assert token_bytes(QWEN3_8B, BF16) == 147_456


def test_answers_that_are_asked_for_have_room_where_there_is_memory():
    block = 128 * 147_456
    one = 33 * block  # 4097 tokens
    assert room(None) == (one + block, None)  # and the one that vLLM keeps for itself
    assert room(None, answers=16) == (16 * one + block, None)
    assert room(None, tokens=128) == (256 * MIB, None)
    size, note = room(None, answers=256)
    assert size == 16 << 30
    assert note is not None
    assert f"the.key = {size} holds 27 answers of full length" in note
    assert "up to 256 at a time" in note
    assert room(None, answers=256, free=one + block)[0] == one + block
    with pytest.raises(ValueError, match="an answer of up to 4097 tokens"):
        room(None, free=one)


def test_a_gpus_memory_is_left_to_vllm(tmp_path):
    assert room(None, device="cuda", answers=10**6) == (None, None)
    assert room(1 << 30, device="cuda", tokens=4096) == (1 << 30, None)
    for given, said in ((None, False), (5, True)):
        options = ServerOptions(python=tmp_path, dtype="bfloat16", kv_cache_bytes=given)
        assert ("--kv-cache-memory-bytes" in _command(tmp_path, options, 1)) is said


def test_a_given_size_that_holds_no_answer_is_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"the\.key = 268435456 holds 1664 tokens, .*needs 4097"):
        room(256 * MIB)
    # A token takes half of it on each of two devices.
    assert room(256 * MIB, arguments=("--tensor-parallel-size", "2")) == (256 * MIB, None)


def test_it_is_said_before_a_server_starts(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(families.to_hf_config(tiny.CONFIG, dtype="float32"))
    )
    (tmp_path / "python").touch()

    def start(**keys):
        config = SamplerConfig(python=str(tmp_path / "python"), **keys)
        with started_server(
            config,
            tmp_path,
            work=Workload(np.dtype(np.float32), max_model_len=128),
            log=tmp_path / "log",
            note=print,
        ):
            pass

    with pytest.raises(ValueError, match=r"sampler\.kv_cache_bytes = 1000 holds 0 tokens"):
        start(kv_cache_bytes=1000)
    (tmp_path / "python").unlink()
    with pytest.raises(FileNotFoundError, match=r"install_vllm\.sh .*sampler\.device = 'cuda'"):
        start()
    with pytest.raises(FileNotFoundError, match=r"pip install vllm==.*; .*makes one for the CPU"):
        start(device="cuda")


def test_what_is_free_is_some_of_the_memory():
    assert 0 < free_memory() < 1 << 50
