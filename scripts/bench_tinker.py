"""Measures tokens/s of `jaxrl tinker`, through the official client, beside the library's own step
and sampler with the same adapters and model, all alternately, as JSON lines. Beside samples stand
those of the service's sampler alone, "sampler", with as many adapters and without a service.

python scripts/bench_tinker.py --shapes S --tenants 1 4 16 [--precision bf16_master]

All tenants together do the work of the one step: SEQUENCES sequences. It needs `jaxrl[tinker]`. On
a GPU both processes share the device: set XLA_PYTHON_CLIENT_MEM_FRACTION=.4.

--skyrl ENVIRONMENT measures training by the JAX engine of SkyRL's server too, which computes in f32
here, as with --precision fp32. In an environment of Python 3.12:

    pip install 'skyrl[jax,tinker]==0.4.0' aiohttp ray uv
"""

import argparse
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
import optax
import tinker
from benchmarks import peers
from benchmarks.learning import LENGTH, SEQUENCES
from benchmarks.shapes import ANSWER, PROMPT, SHAPES
from benchmarks.timing import Run, alternate, compared, options, write
from experiments.runs import exit_on_sigterm
from tinker import types

from jaxrl.bridge import free_port
from jaxrl.core import MinibatchShape, Precision, given_rollout, jit, pack_minibatch
from jaxrl.learner import make_learner
from jaxrl.losses import grpo
from jaxrl.models import DecoderConfig, Model, decoder, init, lora
from jaxrl.sampling import EmbeddedSampler, OwnTurn, SamplingParams, Turn

RANK, ALPHA, RATE = 32, 32.0, 1e-5
SAMPLER_NOISE = 0.1


def material(config: DecoderConfig) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts and random completions."""
    rng = np.random.default_rng(0)
    found = rng.integers(100, config.vocab_size, (SEQUENCES, PROMPT + ANSWER)).tolist()
    return [one[:PROMPT] for one in found], [one[PROMPT:] for one in found]


def adapted_model(config: DecoderConfig, precision: Precision) -> tuple[Model, lora.Adapted]:
    """Builds a random model with adapters."""
    model = decoder(config, remat="matmuls")
    base = init(model.specs, jax.random.key(0), dtype=precision.params)
    specs = lora.adapter_specs(model.specs, rank=RANK, targets=("*_proj", "lm_head"))
    adapters = init(specs, jax.random.key(1), dtype=precision.params)
    return model, lora.Adapted(adapters, base, ALPHA)


def own(config: DecoderConfig, precision: Precision, *, rows: int) -> tuple[Run, Run]:
    """Builds the library's step and sampler with adapters."""
    model, adapted = adapted_model(config, precision)
    rollouts = [
        given_rollout(prompt, said)._replace(
            logprobs=np.full(ANSWER, -np.log(config.vocab_size) - SAMPLER_NOISE)
        )
        for prompt, said in zip(*material(config), strict=True)
    ]
    shape = MinibatchShape(row_length=LENGTH, rows_per_microbatch=rows)
    minibatch = pack_minibatch(rollouts, [1.0] * SEQUENCES, shape=shape)
    optimizer = optax.adamw(RATE, weight_decay=0.0)
    learner = make_learner(model, grpo().objective, optimizer=optimizer, precision=precision)
    state, step = jit(learner.init)(adapted), jit(learner.step, donate_argnums=0)
    sampler = EmbeddedSampler(model, lora.attach(adapted), precision=precision, max_batch=SEQUENCES)
    prompts = [np.asarray(prompt, np.int32) for prompt in material(config)[0]]

    def train(_: int) -> None:
        nonlocal state
        state, metrics = step(state, minibatch)
        jax.block_until_ready((state, metrics))

    def sample(seed: int) -> None:
        turns = [Turn(prompt, i, 0, ANSWER) for i, prompt in enumerate(prompts)]
        list(sampler.sample_turns(turns, SamplingParams(max_tokens=ANSWER, seed=seed)))

    return train, sample


def shared(config: DecoderConfig, precision: Precision, *, tenants: Sequence[int]) -> list[Run]:
    """Builds, for each number of tenants, the samples that the service's sampler draws for them."""
    model, adapted = adapted_model(config, precision)
    sampler = EmbeddedSampler(model, adapted.frozen, precision=precision, max_batch=SEQUENCES)
    adapters = [lora.scaled(adapted) for _ in range(max(tenants))]
    prompts = [np.asarray(prompt, np.int32) for prompt in material(config)[0]]

    def sample(seed: int, *, count: int) -> None:
        params = SamplingParams(max_tokens=ANSWER)
        turns = [
            OwnTurn(Turn(prompt, seed, i, ANSWER), params, i % count)
            for i, prompt in enumerate(prompts)
        ]
        batch, left = sampler.open_own(), SEQUENCES
        batch.add(turns, adapters[:count])
        while left:
            left -= len(batch.advance())

    return [functools.partial(sample, count=count) for count in tenants]


@contextmanager
def served(
    model: Path, state: Path, *, precision: str, rows: int, slots: int
) -> Iterator[tinker.ServiceClient]:
    """Starts a service of a model; yields a client."""
    command = [sys.executable, "-m", "jaxrl", "tinker", str(model), "--port", "0"]
    command += ["--precision", precision, "--state_dir", str(state)]
    command += ["--microbatch_tokens", str(rows * LENGTH), "--max_batch", str(SEQUENCES)]
    command += ["--slots", str(slots)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().removeprefix("export ").strip() for _ in range(2)]
        url, key = (line.split("=", 1)[1] for line in lines)
        with tinker.ServiceClient(base_url=url, api_key=key) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


@contextmanager
def skyrl(
    environment: Path, model: Path, state: Path, *, rows: int, slots: int
) -> Iterator[tinker.ServiceClient]:
    """Starts SkyRL's server of a model; yields a client. Its log is skyrl.log beside `state`."""
    port = free_port("127.0.0.1", 0)
    engine = {
        "max_lora_adapters": slots + 1,  # the first is the base's
        "max_lora_rank": RANK,
        "train_micro_batch_size": rows,
        "sample_max_num_sequences": SEQUENCES,
    }
    keys = {
        "backend": "jax",
        "host": "127.0.0.1",
        "port": port,
        "base-model": model,
        "checkpoints-base": state,
        "database-url": f"sqlite:///{state}.db",
        "backend-config": json.dumps(engine),
    }
    places = environment / "bin"
    # The server starts its engine as it was started itself: by `uv run`.
    command = [str(places / "uv"), "run", "--no-project", "--active", "--offline"]
    command += ["-m", "skyrl.tinker.api"]
    command += [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    path = f"{places}{os.pathsep}{os.environ['PATH']}"
    own = os.environ | {"VIRTUAL_ENV": str(environment), "PATH": path}
    with state.with_name("skyrl.log").open("wb") as log:
        process = subprocess.Popen(command, env=own, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.5)
            yield tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-any")
        finally:
            process.terminate()
            process.wait()


def through_service(
    service: tinker.ServiceClient, model: Path, config: DecoderConfig, *, tenants: int
) -> tuple[Run, Run]:
    """Builds the same work through the client, divided among tenants."""
    prompts, completions = material(config)
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([*prompt, *said[:-1]]),
            loss_fn_inputs={
                "target_tokens": [*prompt[1:], *said],
                "logprobs": [0.0] * (PROMPT - 1)
                + [float(-np.log(config.vocab_size) - SAMPLER_NOISE)] * ANSWER,
                "advantages": [0.0] * (PROMPT - 1) + [1.0] * ANSWER,
            },
        )
        for prompt, said in zip(prompts, completions, strict=True)
    ]
    parts = [data[i::tenants] for i in range(tenants)]
    asked = [prompts[i::tenants] for i in range(tenants)]
    clients = [
        service.create_lora_training_client(str(model), rank=RANK, seed=i).result()
        for i in range(tenants)
    ]
    samplers = [one.save_weights_and_get_sampling_client().result() for one in clients]
    pool = ThreadPoolExecutor(tenants)

    def train(_: int) -> None:
        def one(place: int) -> None:
            done = clients[place].forward_backward(parts[place], "importance_sampling")
            clients[place].optim_step(types.AdamParams(learning_rate=RATE)).result()
            done.result()

        list(pool.map(one, range(tenants)))

    def sample(seed: int) -> None:
        params = types.SamplingParams(max_tokens=ANSWER, stop=[], seed=seed)
        waiting = [
            samplers[place].sample(types.ModelInput.from_ints(prompt), 1, params)
            for place in range(tenants)
            for prompt in asked[place]
        ]
        for one in waiting:
            one.result()

    return train, sample


def main() -> None:
    parser = options(__doc__, repetitions=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["S"])
    parser.add_argument("--tenants", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--precision", default="bf16_master")
    parser.add_argument("--rows", type=int, default=16, help="sequences per microbatch")
    parser.add_argument("--skyrl", type=Path, help="environment with SkyRL 0.4.0")
    args = parser.parse_args()
    exit_on_sigterm()
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as directory:
            measure(shape, Path(directory), args)


def measure(shape: str, directory: Path, args: argparse.Namespace) -> None:
    """Measures a random model of a shape, and writes the results."""
    config, (model, _) = SHAPES[shape], peers.write_material(directory, shape)
    precision = Precision.parse(args.precision)
    train, sample = own(config, precision, rows=args.rows)
    samplers = shared(config, precision, tenants=args.tenants)
    given = {"rows": args.rows, "slots": sum(args.tenants)}
    with ExitStack() as closing:
        state = directory / "state"
        service = served(model, state, precision=args.precision, **given)
        services = {"service": closing.enter_context(service)}
        if args.skyrl:
            beside = skyrl(args.skyrl.resolve(), model, directory / "skyrl", **given)
            services["skyrl"] = closing.enter_context(beside)
        through = {
            (name, n): through_service(one, model, config, tenants=n)
            for name, one in services.items()
            for n in args.tenants
        }
        for work, place, theirs, tokens in (
            ("forward_backward and optim_step", 0, train, SEQUENCES * LENGTH),
            ("sample", 1, sample, SEQUENCES * ANSWER),
        ):
            # SkyRL 0.4.0 answers a request for samples without the names that the client expects.
            names = [name for name in services if name == "service" or place == 0]
            runs = {f"{name} {n}": through[name, n][place] for name in names for n in args.tenants}
            if place == 1:
                names.append("sampler")
                runs |= {f"sampler {n}": run for n, run in zip(args.tenants, samplers, strict=True)}
            seconds = alternate({"library": theirs, **runs}, repetitions=args.repetitions)
            for n in args.tenants:
                row = {"shape": shape, "work": work, "tenants": n, "rank": RANK}
                row |= {"precision": args.precision, "sequences": SEQUENCES}
                one = {name: seconds[f"{name} {n}"] for name in names}
                one["library"] = seconds["library"]
                write(row | compared(one, tokens=tokens, ours="service"), args.out)


if __name__ == "__main__":
    main()
