"""One vLLM server of a fleet: its state, and the command that runs it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from jaxrl.config.training import Config
from jaxrl.core import short_name
from jaxrl.fleet.child import Place
from jaxrl.fleet.placement import Slot
from jaxrl.huggingface import Checkpoint

_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^\n]*\} (\S+)$", re.MULTILINE)


@dataclasses.dataclass
class Server:
    """A server in its slot."""

    slot: Slot
    index: int
    added: bool = False  # in mid-run, in a slot of its own
    actor: Any = None
    place: Place | None = None  # of its first start, which its address names
    answer: Any = None  # of the call that is running: for the place, then for the process's end
    running: bool = False
    spoken: Any = None  # of the call that ends when it is ready
    ready: bool = False
    listed: bool = False  # it was ready once, so the learner knows it
    leaving: bool = False  # it finishes its requests
    idle: float | None = None  # since when it has had none
    asked: Any = None  # of the call that reads its numbers
    late: float | None = None  # when to say that it still waits for a place
    begun: float = 0.0
    due: float | None = None  # when it is started again
    failures: int = 0

    @property
    def part(self) -> str:
        """Its name in events."""
        return f"server {self.index}"


def open_requests(metrics: str) -> int:
    """Counts a server's requests, running and waiting, from the text of its /metrics."""
    return round(sum(map(float, _REQUESTS.findall(metrics))))


def arguments(config: Config, place: Place, *, directory: Path, host: str, log: str) -> list[str]:
    """Returns the arguments of `jaxrl`: a server as the run would start it. `directory` is where
    the run's paths start."""
    c, sampler = config, config.sampler
    model = Path(directory, c.model.path)
    keys = {
        "host": host,
        "port": place.port,
        "dtype": short_name(c.precision.sampler),
        "logits": short_name(c.precision.logits),
        "blocks": c.precision.blocks,
        "python": sampler.python,
        "device": sampler.device,
        "log": log,
        "max_model_len": min(c.longest_sequence + 1, Checkpoint(model).config.max_positions),
    }
    if sampler.kv_cache_bytes is not None:
        keys["kv_cache_bytes"] = sampler.kv_cache_bytes
    if c.lora.publish == "adapters":
        keys["max_lora_rank"] = c.lora.rank
    given = [f"--{name}={value}" for name, value in keys.items()]
    args = ["--vllm_args", json.dumps(sampler.vllm_args)] if sampler.vllm_args else []
    return ["serve", str(model), *given, *args]
