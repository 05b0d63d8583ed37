"""vLLM's engine in a child process, with the interface of `VllmServer`."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxrl.bridge.base import (
    POISONED,
    REFUSED,
    InFlight,
    LearnerIdentity,
    PoisonedError,
    RefusedError,
    Timings,
    marker,
)
from tests.bridge.cases import LEARNER

ROOT = Path(__file__).parent.parent.parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build is for Linux")


class ChildEngine:
    """An engine with one model; `open` replaces it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.model: Path | None = None
        self.learner = LEARNER

    def call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        response = json.loads(self._process.stdout.readline() or '{"error": "vLLM died"}')
        if "ok" in response:
            return response["ok"]
        text = response["error"]
        kinds = {REFUSED: RefusedError, POISONED: PoisonedError, None: RuntimeError}
        raise kinds[marker(text)](text)

    def open(
        self,
        model: Path,
        dtype: str,
        *,
        logprobs: str = "processed_logprobs",
        head: str = "float32",
        quantization: str | None = None,
    ) -> None:
        settings = {"logprobs_mode": logprobs, "head": head, "quantization": quantization}
        self.call("open", model=str(model), dtype=dtype, **settings)
        self.model = model

    def generate(self, prompts: list[list[int]]) -> list:
        return self.call("generate", prompts=prompts)

    def connect(
        self,
        *,
        root: str,
        wire: str,
        sampler: str,
        logits: str = "float32",
        learner: LearnerIdentity = LEARNER,
        blocks: str = "none",
    ) -> None:
        roles = {"wire": wire, "sampler": sampler, "logits": logits, "blocks": blocks}
        self.call("connect", root=root, **roles, learner=learner._asdict())
        self.learner = learner

    def update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        start = time.perf_counter()
        self.call("update", payload=payload, version=version, learner=self.learner._asdict())
        return Timings(load=time.perf_counter() - start)


@contextmanager
def child_engine() -> Iterator[ChildEngine]:
    """Runs the process for the block and prints the end of vLLM's output."""
    command = [VLLM_PYTHON, Path(__file__).with_name("vllm_child.py")]
    with (
        tempfile.TemporaryDirectory() as place,  # a killed vLLM leaves a file for each model
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command,
            env=os.environ | {"TMPDIR": place},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield ChildEngine(process)
        finally:
            process.kill()
            log.seek(0)
            print("".join(log.readlines()[-60:]))
