"""Kills `jaxrl tinker` with SIGKILL at random moments while eight clients train on it, and compares
each with its training alone on a server that is not killed.

    python scripts/tinker_kills.py runs/tinker_kills [--kills 30] [--clients 8] [--steps 40]

Needs `jaxrl[tinker]` and no model. Every client has adapters, data and a seed of its own, and is
the official one, which repeats requests until they are answered. Losses, samples and last log-probs
must be those of training alone, up to rounding. Exits with status 1 otherwise.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import make_arithmetic
import numpy as np
import tinker
from experiments.runs import plain_parser
from tinker import types

KEY, LIMIT = "tml-kills", 1e-4
# A lost step moves a loss by 1e-2 of its size; rounding, which larger steps amplify, by 1e-6.
ADAM = types.AdamParams(learning_rate=1e-3, eps=1e-3)


class Server:
    """A service that comes back on the same port with the same state."""

    def __init__(self, model: Path, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._model, self._directory, self._port = model, directory, "0"
        self.start()

    def start(self) -> None:
        """Starts the process and waits until it serves."""
        command = [sys.executable, "-m", "jaxrl", "tinker", str(self._model), "--name", "model"]
        command += ["--port", self._port, "--precision", "fp32", "--snapshot_seconds", "2"]
        command += ["--state_dir", str(self._directory / "state")]
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"TINKER_API_KEY": KEY},
            )
        line = read(self.process.stdout)
        if not line:
            raise SystemExit(f"the server ended; see {self._directory / 'log'}")
        self.url = line.strip().partition("=")[2]
        self._port = self.url.rpartition(":")[2]

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait()


def read(stream: IO[str] | None) -> str:
    """Reads a line."""
    assert stream is not None
    return stream.readline()


@contextmanager
def serving(model: Path, directory: Path) -> Iterator[Server]:
    """Runs a server for the block. A signal ends it and this program at once: clients go on asking
    a server that is gone, and a thread cannot be ended."""
    server = Server(model, directory)

    def end(number: int, _: object) -> None:
        server.kill()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        yield server
    finally:
        server.kill()


class Trained(NamedTuple):
    """The numbers of a client: losses, the last log-probs, and sampled tokens."""

    losses: list[float]
    logprobs: list[float]
    samples: list[list[int]]


def train(url: str, seed: int, *, steps: int) -> Trained:
    """Trains adapters of a client's own."""
    rng = np.random.default_rng(seed)
    data, losses, samples = [datum(rng) for _ in range(3)], list[float](), list[list[int]]()
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client("model", rank=4, seed=seed).result()
        for step in range(steps):
            done = client.forward_backward(data, "cross_entropy")
            client.optim_step(ADAM)
            losses.append(done.result().metrics["loss:sum"])
            if step % 10 == 9:
                sampler = client.save_weights_and_get_sampling_client().result()
                params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[], seed=1)
                asked = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params)
                samples.append(list(asked.result().sequences[0].tokens))
        found = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return Trained(losses, [x for one in found for x in one["logprobs"].tolist()], samples)


def datum(rng: np.random.Generator) -> types.Datum:
    """Makes a random text."""
    tokens = rng.integers(2, 16, rng.integers(8, 60)).tolist()
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def disturb(server: Server, chance: random.Random, *, kills: int, ended: threading.Event) -> int:
    """Kills the server at random moments while clients train; returns the number of kills.

    Ends this program if the server does not come back.
    """
    for killed in range(kills):
        if ended.wait(chance.uniform(0, 6)):
            return killed
        server.kill()
        try:
            server.start()
        except SystemExit as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    return kills


def furthest(found: Trained, alone: Trained) -> float:
    """Returns the largest deviation of losses and log-probs, as a share of their size; NaN if it is
    unknown."""
    ours, theirs = (np.array(one.losses + one.logprobs) for one in (found, alone))
    return float(np.max(np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))))


def main() -> int:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    return run(parser.parse_args())


def run(options: argparse.Namespace) -> int:
    """Trains each client alone, and all of them on a server that is killed; returns the status."""
    model, seeds = options.directory / "model", range(options.clients)
    make_arithmetic.write_model(model, make_arithmetic.TINY, seed=0)
    with serving(model, options.directory / "alone") as server:
        alone = [train(server.url, seed, steps=options.steps) for seed in seeds]
    chance, killed, rounds, status = random.Random(options.seed), 0, 0, 0
    while killed < options.kills:
        begun = time.monotonic()
        with (
            serving(model, options.directory / f"killed_{rounds}") as server,
            ThreadPoolExecutor(options.clients + 1) as pool,
        ):
            ended, url, kills = threading.Event(), server.url, options.kills - killed
            killer = pool.submit(disturb, server, chance, kills=kills, ended=ended)
            running = [pool.submit(train, url, seed, steps=options.steps) for seed in seeds]
            found = [one.result() for one in running]
            ended.set()
            killed += killer.result()
        rounds += 1
        deviations = [furthest(one, own) for one, own in zip(found, alone, strict=True)]
        samples = sum(one.samples != own.samples for one, own in zip(found, alone, strict=True))
        worst = float(np.max(deviations))
        failed = not worst <= LIMIT or samples > 0  # NaN fails, too
        status |= failed
        print(
            f"{killed} kills, {rounds} rounds of {time.monotonic() - begun:.0f} s: the furthest of "
            f"{options.clients} clients is {worst:.1e} from training alone, "
            f"{samples} sampled otherwise: {'DIFFERENT' if failed else 'the same'}",
            flush=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
