"""Times a publish to a vLLM server by part, as JSON lines.

python scripts/bench_bridge.py --models S 0.5B --params bf16 f32 --wire bf16

With --transport none it times the write alone, against a copy, without a server.

python scripts/bench_bridge.py --models M --params bf16 --transport none --repetitions 12

With --transport store it times the transfer over slow links into the shared memory of hosts. Pause,
load and resume follow there as in the other transport.

python scripts/bench_bridge.py --transport store --bandwidth 1Gbit --hosts 3

With --transport processes it times how a learner of two processes on this machine fetches its
tensors: each process its share, and process 0 all.

python scripts/bench_bridge.py --transport processes --models M --params f32
"""

import argparse
import itertools
import statistics
from typing import Any

from benchmarks import hosts, processes
from benchmarks.publishing import MODELS, measure, measure_write
from benchmarks.timing import options, write
from experiments.runs import exit_on_sigterm

from jaxrl.core import Precision


def main() -> None:
    parser = options(__doc__, repetitions=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["S"])
    parser.add_argument(
        "--params", nargs="+", default=["bf16", "f32"], help="dtype of the learner's weights"
    )
    parser.add_argument("--wire", default="bf16", help="dtype of wire and server")
    transports = ["memory", "none", "store", "processes"]
    parser.add_argument("--transport", choices=transports, default="memory")
    parser.add_argument("--bandwidth", default="1Gbit", help="of each link, such as 100Mbit")
    parser.add_argument("--hosts", type=int, default=1)
    args = parser.parse_args()
    exit_on_sigterm()
    if args.transport == "store":
        through_store(args)
        return
    ways = {"none": write_alone, "memory": through_memory, "processes": of_processes}
    timed = ways[args.transport]
    for name, params in itertools.product(args.models, args.params):
        precision = Precision.parse(f"fp32,params={params},wire={args.wire},sampler={args.wire}")
        dtypes = {"params_dtype": precision.params, "wire": precision.wire}
        row = {"model": name, "params": params, "wire": args.wire}
        write(row | timed(name, **dtypes, repetitions=args.repetitions), args.out)


def through_store(args: argparse.Namespace) -> None:
    number, unit = args.bandwidth.removesuffix("bit")[:-1], args.bandwidth.removesuffix("bit")[-1]
    bandwidth = float(number) * {"M": 1e6, "G": 1e9}[unit] / 8
    for name in args.models:
        wire = Precision.parse(f"fp32,wire={args.wire}").wire
        for row in hosts.measure(name, wire=wire, hosts=args.hosts, bandwidth=bandwidth):
            write({"model": name, "link": args.bandwidth, "hosts": args.hosts, **row}, args.out)


def write_alone(name: str, **given: Any) -> dict[str, float]:
    nbytes, seconds = measure_write(name, **given)
    middle = {part: statistics.median(values) for part, values in seconds.items()}
    return {"MB": nbytes / 1e6, **middle, "write over copy": middle["copy"] / middle["write"]}


def of_processes(name: str, **given: Any) -> dict[str, float]:
    shares, alone = (statistics.median(seconds) for seconds in processes.measure(name, **given))
    return {"each its share": shares, "process 0 all": alone}


def through_memory(name: str, **given: Any) -> dict[str, Any]:
    nbytes, seconds = measure(name, **given)
    parts = ("write", "pause", "load", "resume")
    seconds["end to end"] = [sum(p) for p in zip(*(seconds[k] for k in parts), strict=True)]
    served = [sum(p) for p in zip(*(seconds[k] for k in parts[1:]), strict=True)]
    load, reload = seconds["load"], seconds["vLLM reload"]
    row: dict[str, Any] = {"MB": nbytes / 1e6}
    for part, values in seconds.items():
        middle = statistics.median(values)
        row[part] = {"median": middle, "best": min(values), "worst": max(values)}
    row["server over reload, best of each"] = min(served) / min(reload)
    row["load over reload, rounds"] = [a / b for a, b in zip(load, reload, strict=True)]
    row["load over reload"] = statistics.median(load) / statistics.median(reload)
    return row


if __name__ == "__main__":
    main()
