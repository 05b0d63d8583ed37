"""`jaxrl serve`: runs a vLLM server that takes weights from a learner."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import PositiveInt

from jaxrl import precision
from jaxrl.commands import options
from jaxrl.config_tables import ServerConfig

DESCRIPTION = """Runs a stock vLLM server on 127.0.0.1 that takes weights from a learner.

  jaxrl serve runs/quickstart/sft/model --port 8000 --dtype f32
  jaxrl train configs/quickstart.toml --sampler vllm --sampler.url http://127.0.0.1:8000"""


class ServeConfig(ServerConfig):
    """How the server runs."""

    dtype: str = "bf16"
    """What it computes in: f32, bf16 or f16; the `sampler` role of the learner's precision."""

    max_model_len: PositiveInt | None = None
    """Longest prompt and answer together, in tokens; the model's own limit when absent."""

    log: str = "vllm.log"
    """File for what the server prints."""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = options.parser("serve", ServeConfig, description=DESCRIPTION, usage="MODEL_DIR")
    made.add_argument("model_dir", metavar="MODEL_DIR", type=Path, help="a local HF checkpoint")
    config, arguments = options.parse(made, ServeConfig, argv)
    return _serve(config, arguments)


def _serve(config: ServeConfig, arguments: argparse.Namespace) -> int:
    from jaxrl.samplers import started_server

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with started_server(
            config,
            arguments.model_dir,
            dtype=precision.parse(f"fp32,sampler={config.dtype}").sampler,
            max_model_len=config.max_model_len,
            log=Path(config.log),
            note=note,
        ) as server:
            print(server.url, flush=True)
            while True:
                server.check()
                time.sleep(0.5)
    except KeyboardInterrupt:
        note("vLLM has ended")
        return 0
