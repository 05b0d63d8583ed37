"""Alternating timings, the machine's peak, and results as lines of JSON."""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from experiments.runs import plain_parser

from jaxrl.core import Precision, product_unit

Run = Callable[[int], object]  # does the work with a seed and waits for it


def options(doc: str | None, *, repetitions: int) -> argparse.ArgumentParser:
    """Makes a parser with the options of every benchmark that writes lines of JSON."""
    parser = plain_parser(doc)
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    return parser


def alternate(
    runs: Mapping[str, Run], *, repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Times the runs alternately, so that disturbances affect them alike, after one call of each to
    compile. `time.process_time` as `clock` counts the seconds of all cores."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(repetitions + 1):
        for name, run in runs.items():
            start = clock()
            run(seed)
            if seed:
                seconds[name].append(clock() - start)
    return seconds


def processor() -> str:
    """Names the processor, with its number of cores and its widest unit for matrix products."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    found = {name.strip(): value.strip() for name, value in lines.items()}
    name = found.get("model name") or platform.processor()
    unit = product_unit()
    return f"{os.cpu_count()} cores, {name}" + (f", {unit}" if unit else "")


def matmul_peak(dtype: str) -> float:
    """Measures FLOP/s of a large matrix product with operands in `dtype` and an f32 result."""
    size = 2048
    x = jnp.ones((size, size), Precision.parse(f"fp32,sampler={dtype}").sampler)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    seconds = alternate({"": lambda _: product(x).block_until_ready()}, repetitions=8)
    return 2 * size**3 / min(seconds[""])


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns the best, median and worst of a rate."""
    return {"best": max(values), "median": statistics.median(values), "worst": min(values)}


def compared(
    seconds: Mapping[str, Sequence[float]], *, tokens: int, ours: str = "jaxrl"
) -> dict[str, Any]:
    """Summarises the tokens/s of a run and of the others, and their ratio in each round; each run
    took these seconds for `tokens`."""
    rates = {name: [tokens / s for s in values] for name, values in seconds.items()}
    own, beside = rates.pop(ours), {}
    for name, values in rates.items():
        rounds = [a / b for a, b in zip(own, values, strict=True)]
        speed = {"median of rounds": statistics.median(rounds), "rounds": rounds}
        beside[name] = {"tokens/s": summary(values), "speed": speed}
    return {"tokens/s": summary(own), "beside": beside}


def write(row: dict[str, Any], out: Path | None) -> None:
    """Prints a result and the machine as a line of JSON, and appends it to `out`."""
    row |= {
        "devices": jax.device_count(),
        "device": jax.devices()[0].device_kind,
        "processor": processor(),
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
    }
    line = json.dumps(_rounded(row))
    print(line, flush=True)
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
