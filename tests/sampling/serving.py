"""Real vLLM servers of a tiny model, and samplers that use them."""

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.launch import LocalServer, free_port
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_trained
from jaxrl.builders.sampler import SamplerNeeds, Serving, open_sampler
from jaxrl.builders.servers import starting_server
from jaxrl.builders.weight_sync import Adapters, WeightRoute
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.core.batch import Minibatch, given_rollout
from jaxrl.core.packing import pack
from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.learner.policy import make_score
from jaxrl.models.model import decoder
from tests import tiny
from tests.bridge.engines import VLLM_PYTHON
from tests.run_config import run_config

SERVED = dataclasses.replace(tiny.CONFIG, head_dim=32)  # vLLM on CPU has no smaller heads
FP32 = precision.PRESETS["fp32"]
MODEL = decoder(SERVED)


class Material(NamedTuple):
    url: str
    directory: Path


def write_material(directory: Path) -> None:
    """Writes a model, prompts and a reward."""
    tiny.write_checkpoint(directory / "model", config=SERVED)
    lines = "".join(json.dumps({"prompt": f"{i} + {i}", "answer": i}) + "\n" for i in range(8))
    (directory / "prompts.jsonl").write_text(lines)
    (directory / "reward.py").write_text("def short(text, row):\n    return -len(text) / 8\n")


@contextmanager
def started(
    directory: Path, *, port: int = 0, rank: int = 0, blocks: str = "none"
) -> Iterator[LocalServer]:
    with starting_server(
        config(directory).sampler,
        Checkpoint(directory / "model"),
        dtype=FP32.sampler,
        blocks=blocks,
        log=directory / f"vllm-{port}-{rank}.log",
        note=print,
        max_lora_rank=rank,
        port=port,
    ) as starting:
        yield starting.wait()


@contextmanager
def stock_server(model: Path, *arguments: str) -> Iterator[str]:
    """Starts vLLM without jaxrl's plugin, in f32; gives its address."""
    port = free_port("127.0.0.1", 0)
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--dtype", "float32", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "128"]
    command += ["--kv-cache-memory-bytes", str(32 << 20), *arguments]
    environment = os.environ | {
        "VLLM_PLUGINS": "none",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    with (
        tempfile.TemporaryDirectory() as place,  # where a killed vLLM leaves files
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            env=environment | {"TMPDIR": place},
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + 500
            while not VllmServer(url, timeout=5.0).healthy():
                if process.poll() is not None:
                    log.seek(0)
                    raise AssertionError(log.read().decode(errors="replace")[-3000:])
                assert time.monotonic() < end
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def config(directory: Path, **changes: str) -> Config:
    own = {
        "data.max_prompt_tokens": 16,
        "reward.path": f"{directory}/reward.py:short",
        "sampling.max_tokens": 12,
        "sampler.name": "vllm",
        "sampler.kv_cache_bytes": 64 << 20,
        "train.microbatch_tokens": 112,
    }
    return run_config(directory, **own | changes)


@contextmanager
def opened(
    material: Material, urls: Sequence[str], *, note: Callable[[str], None], **changes: str
) -> Iterator[Serving]:
    made = config(material.directory, sampler__url=json.dumps(urls), **changes)
    layout = make_layout(made.mesh)
    checkpoint = Checkpoint(material.directory / "model")
    model, params, specs = load_trained(made, checkpoint, layout=layout)
    with open_sampler(
        made.sampler,
        WeightRoute(model, params, 0, FP32, checkpoint),
        layout=layout,
        directory=material.directory,
        note=note,
        needs=SamplerNeeds(
            made.longest_sequence,
            made.sampling.max_batch,
            Adapters(specs, 2) if made.lora.publish == "adapters" else None,
        ),
    ) as serving:
        yield serving


def signal_all(server: LocalServer, signum: int) -> None:
    for process in server.process_ids:
        os.kill(process, signum)


def batch_logprobs(rollouts, params, *, temperature: float, row_length: int) -> np.ndarray:
    """Scores one sequence per row: f32[N, row_length]."""
    model = MODEL._replace(temperature=temperature)
    score = make_score(model, precision=FP32)
    rows = [[i] for i in range(len(rollouts))]
    batch = pack(rollouts, [0.0] * len(rollouts), rows=rows, row_length=row_length)
    given = Minibatch(batch=batch, microbatches=np.int32(1), rows_per_microbatch=len(rollouts))
    scored = jax.jit(score)(params, given)
    return np.asarray(scored)


def all_logprobs(params, tokens) -> np.ndarray:
    """Scores a sequence, i32[T], with the learner: f32[T], 0 for the first token."""
    rollout = given_rollout(tokens[:1], tokens[1:])
    return batch_logprobs([rollout], params, temperature=1.0, row_length=len(tokens))[0]
