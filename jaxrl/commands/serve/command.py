"""Runs a stock vLLM server that accepts weights from a learner.

  jaxrl serve runs/quickstart/sft/model --port 8000 --dtype f32
  jaxrl train configs/quickstart.toml --sampler vllm --sampler.url http://127.0.0.1:8000

With --replicas N it runs N servers on consecutive ports. A server that exits or hangs is restarted;
a run sends it the weights at the next publish. If jaxrl[store] is installed, an agent fetches the
weights of runs with sampler.store, for all servers of the command."""

import argparse
import functools
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from jaxrl.bridge import AgentProcess, available, free_memory, free_port, server_key
from jaxrl.builders.servers import StartingServer, starting_server
from jaxrl.commands import options
from jaxrl.commands.serve.replicas import Replica, open_replicas, watch
from jaxrl.config.sampler import ServerConfig
from jaxrl.core import Precision
from jaxrl.huggingface import Checkpoint, hub


class ServeConfig(ServerConfig):
    """Settings of the servers."""

    dtype: str = "bf16"
    """Compute dtype: f32, bf16 or f16; the `sampler` role of the learner's precision."""

    logits: str = "f32"
    """Dtype of the output layer's product: f32, as in every preset, or that of dtype; the `logits`
    role of the learner's precision."""

    blocks: str = "none"
    """Form of the operands of projections: none, or int8 on a CPU; the `blocks` role of the
    learner's precision."""

    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port to listen at; 0 takes a free one."""

    max_lora_rank: NonNegativeInt = 0
    """Largest rank of the adapters that runs with lora.publish = 'adapters' publish to it."""

    max_model_len: PositiveInt | None = None
    """Limit on prompt plus completion, in tokens; default: the model's own limit."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback is open to other machines and needs the
    environment variable JAXRL_API_KEY, with the same value where the learner runs. On loopback a
    key is made, and runs of the same user find it."""

    log: str = "vllm.log"
    """File for the server's output; further replicas add a number to its name."""

    replicas: PositiveInt = 1
    """Number of servers, on consecutive ports from `port`, which must then be set."""

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.replicas > 1 and not 0 < self.port <= 65536 - self.replicas:
            raise ValueError(
                f"replicas = {self.replicas} and port = {self.port}: choose the first "
                f"of {self.replicas} ports, for example port = 8000"
            )
        return self


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser("serve", ServeConfig, description=__doc__, usage="MODEL_DIR")
    text = "directory of a Hugging Face model, or its name on the hub"
    made.add_argument("model_dir", metavar="MODEL_DIR", help=text)
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, arguments = options.parse_arguments(parser(), ServeConfig, argv)
    checkpoint = Checkpoint(hub.local_directory(arguments.model_dir))
    roles = f"sampler={config.dtype},logits={config.logits},blocks={config.blocks}"
    precision = Precision.parse(f"fp32,{roles}")
    # A restarted server keeps its port, its key and its part of the memory.
    first, key = config.port or free_port(config.host, 0), server_key(config.host)
    memory = free_memory() // config.replicas
    note = functools.partial(print, file=sys.stderr, flush=True)

    def start(replica: int, agent: AgentProcess | None) -> AbstractContextManager[StartingServer]:
        log = Path(config.log)
        return starting_server(
            config,
            checkpoint,
            dtype=precision.sampler,
            logits=precision.logits.name,
            blocks=precision.blocks,
            log=log.with_stem(f"{log.stem}-{replica}") if replica else log,
            note=note,
            memory=memory,
            max_model_len=config.max_model_len,
            max_lora_rank=config.max_lora_rank,
            host=config.host,
            port=first + replica,
            api_key=key,
            agent=agent and agent.directory,
        )

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    try:
        with ExitStack() as stack:
            agent = None
            if available():
                agent = stack.enter_context(AgentProcess(key=key, note=note))
            # A starting vLLM measures the GPU's free memory, which must not change meanwhile.
            measured = config.device == "cuda" and config.kv_cache_bytes is None
            turn = threading.Lock() if measured else None
            begun = (
                Replica(functools.partial(start, i, agent), note=note, turn=turn)
                for i in range(config.replicas)
            )
            replicas = open_replicas(begun, stack, together=not measured)
            print("\n".join(replica.url for replica in replicas), flush=True)
            watch(replicas)
    except KeyboardInterrupt:
        note("vLLM stopped")
        return 0
