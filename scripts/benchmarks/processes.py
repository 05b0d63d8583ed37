"""Times a learner of several processes that fetches its tensors for servers."""

import json
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np
from benchmarks.publishing import MODELS

from jaxrl.bridge import ParamsSource, free_port
from jaxrl.core import DType, Hosts
from jaxrl.models import decoder, init
from jaxrl.sharding import PRESETS, Layout, make_mesh, place

_DEVICES = 4  # simulated, of all processes


def measure(name: str, *, params_dtype: DType, wire: DType, repetitions: int) -> list[list[float]]:
    """Returns the seconds of two processes on a mesh of four devices with `fsdp`, in which each
    fetches its share, as for a store, and in which process 0 fetches all, as for shared memory."""
    given = {"name": name, "params": params_dtype.name, "wire": wire.name, "times": repetitions}
    count, address = 2, f"127.0.0.1:{free_port('127.0.0.1', 0)}"
    flags = f"--xla_force_host_platform_device_count={_DEVICES // count}"
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes", json.dumps([address, count, i, given])],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for i in range(count)
    ]
    try:
        said = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError("a process failed; its output says why")
    return json.loads(said[0].splitlines()[-1])  # Gloo prints, too


def _fetch(given: dict[str, Any]) -> list[list[float]]:
    hosts, layout = Hosts(), Layout(make_mesh(fsdp=-1), PRESETS["fsdp"])
    specs = decoder(MODELS[given["name"]]).specs
    params_dtype, wire = (np.dtype(given[key]) for key in ("params", "wire"))
    host = jax.device_get(init(specs, jax.random.key(0), dtype=params_dtype))
    params, found = place(host, layout.tree(specs)), list[list[float]]()
    for processes in (hosts.count, 1):
        seconds = []
        for _ in range(given["times"] + 1):
            hosts.share(0)
            start = time.perf_counter()
            deque(ParamsSource(params, specs, dtype=wire, processes=processes), maxlen=0)
            hosts.share(0)
            seconds.append(time.perf_counter() - start)
        found.append(seconds[1:])
    return found


def main() -> None:
    address, count, index, given = json.loads(sys.argv[1])
    jax.distributed.initialize(address, num_processes=count, process_id=index)
    found = _fetch(given)
    if index == 0:
        print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
