"""Measures the table of docs/results/speed.md for this machine and writes it there.

    python scripts/make_speed_doc.py runs/speed --plain DIR --peers .venv-peers

Takes 45 minutes, with nothing else on the machine. Results in the directory are not measured
again; remove their files to repeat them. Without --plain and --peers their lines are left out. vLLM
must be installed (scripts/install_vllm.sh).
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.runs import exit_on_sigterm, markdown, plain_parser, write_table

SCRIPTS = Path(__file__).parent
DOCUMENT = SCRIPTS.parent / "docs" / "results" / "speed.md"


class Benchmark(NamedTuple):
    """A benchmark of the table."""

    name: str  # of the file with its results
    work: str  # first column, formatted with the facts of each result
    command: str  # script and arguments
    # Options of this script that its comparisons need -> the script's option.
    needs: Mapping[str, str] = MappingProxyType({})


BENCHMARKS = (
    Benchmark(
        "iteration",
        "whole iteration, {shape}, f32",
        "bench_iteration.py --precisions fp32 --repetitions 2",
        {"peers": "--peers"},
    ),
    Benchmark(
        "learner-S",
        "learner's step, {shape}, `{precision}`",
        "bench_learner.py --shapes S --dtypes f32 bf16 f16 --repetitions 3",
        {"plain": "--torch", "peers": "--peers"},
    ),
    Benchmark(
        "learner-M",
        "learner's step, {shape}, `{precision}`",
        "bench_learner.py --shapes M --dtypes bf16 --repetitions 2",
        {"plain": "--torch"},
    ),
    Benchmark(
        "shared-prompts",
        "learner's step, {shape}, f32, 8 completions of {completion} for prompts of {prompt}",
        "bench_shared_prompts.py --groups 2 --repetitions 3",
    ),
    Benchmark(
        "sampler",
        "{sequences} completions of {longest} tokens, {shape}, {dtype}",
        "bench_sampler.py --sequences 64 256 --beside-vllm --dtypes f32 bf16 --repetitions 2",
        {"plain": "--baseline"},
    ),
    Benchmark(
        "lognormal",
        "{sequences} completions of lognormal lengths, {in flight} in flight, {shape}, {dtype}",
        "bench_sampler.py --sequences 256 --in-flight 64 --lengths lognormal --beside-vllm "
        "--dtypes f32 bf16 --repetitions 2",
    ),
    Benchmark(
        "window",
        "{sequences} completions of {longest} tokens, prompts of {prompt}, window of {window}, "
        "{shape}, {dtype}",
        "bench_sampler.py --sequences 64 --prompt 768 --window 64 --dtypes f32 bf16 "
        "--repetitions 2",
    ),
    Benchmark(
        "turns",
        "{episodes} episodes of {turns} turns, {shape}, {dtype}",
        "bench_turns.py --repetitions 2",
    ),
)


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--plain", type=Path, help="directory of torch_step.py and jax_decode.py")
    parser.add_argument("--peers", type=Path, help="directory of scripts/install_peers.sh")
    args = parser.parse_args()
    exit_on_sigterm()
    args.directory.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, str]] = []
    machine, version, dates = "", "", set[str]()
    for benchmark in BENCHMARKS:
        file = args.directory / f"{benchmark.name}.jsonl"
        if not file.exists():
            measure(benchmark, file, given=vars(args))
        for result in map(json.loads, file.read_text().splitlines()):
            lines += rows(benchmark, result)
            machine, version = result["processor"], result["jax"]
            dates.add(result["date"])
    table = f"{machine}; jax {version}; {' to '.join(sorted({min(dates), max(dates)}))}:\n\n"
    table += markdown(lines)
    write_table(DOCUMENT, machine.split(", ")[-1], table)
    print(table)


def measure(benchmark: Benchmark, file: Path, *, given: dict[str, Any]) -> None:
    """Runs a benchmark; `file` has its results once it succeeds."""
    command = [sys.executable, *benchmark.command.split()]
    command[1] = str(SCRIPTS / command[1])
    for option, path in benchmark.needs.items():
        if given[option] is not None:
            command += [path, str(given[option])]
    draft = file.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    subprocess.run([*command, "--out", str(draft)], check=True, stdout=subprocess.DEVNULL)
    draft.rename(file)


def rows(benchmark: Benchmark, result: dict[str, Any]) -> list[dict[str, str]]:
    """Formats a result: a line for each run beside it."""
    ours = {
        "work": benchmark.work.format(**result),
        "tokens/s, median (range)": rate(result["tokens/s"]),
        "share of peak": f"{result['share']:.0%}" if "share" in result else "",
    }
    found = []
    for name, other in result["beside"].items():
        ratios = ", ".join(f"{ratio:.2f}" for ratio in other["speed"]["rounds"])
        line = {"compared with": name, "its tokens/s": rate(other["tokens/s"])}
        found.append(ours | line | {"speed relative to it, by round": ratios})
        ours = dict.fromkeys(ours, "")
    alone = dict.fromkeys(("compared with", "its tokens/s", "speed relative to it, by round"), "")
    return found or [ours | alone]


def rate(summary: dict[str, float]) -> str:
    """Formats the median and the range of a rate."""
    return f"{summary['median']:,.0f} ({summary['worst']:,.0f} to {summary['best']:,.0f})"


if __name__ == "__main__":
    main()
