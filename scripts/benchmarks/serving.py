"""A vLLM server with random weights, jaxrl's client, and a minimal client."""

import asyncio
import json
import tempfile
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from benchmarks.sampling import GROUP, asked, random_prompts
from benchmarks.shapes import ANSWER, PROMPT
from benchmarks.timing import Run

from jaxrl import huggingface
from jaxrl.bridge import LocalServer, ParamsSource, SharedMemoryPublisher, VllmServer, headers
from jaxrl.builders.servers import starting_server
from jaxrl.config.sampler import ServerConfig
from jaxrl.core import DType
from jaxrl.models import DecoderConfig, Params, decoder, init
from jaxrl.sampling import SamplingParams, VllmSampler

F32 = np.dtype(np.float32)  # of the logits, as in every preset of `Precision`


@contextmanager
def server(
    config: DecoderConfig, *, dtype: DType, logits: DType = F32
) -> Iterator[tuple[LocalServer, Params]]:
    """Starts a server; yields it with its weights."""
    params = init(decoder(config).specs, jax.random.key(0), dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        huggingface.save(directory / "model", params, config, dtype=dtype)
        with starting_server(
            ServerConfig(vllm_args=("--skip-tokenizer-init",), kv_cache_bytes=512 << 20),
            huggingface.Checkpoint(directory / "model"),
            dtype=dtype,
            logits=logits.name,
            log=directory / "log",
            note=lambda text: None,
            max_model_len=PROMPT + ANSWER,
        ) as starting:
            yield starting.wait(), params


@contextmanager
def connected(
    config: DecoderConfig, *, dtype: DType, requests: int, logits: DType = F32
) -> Iterator[tuple[LocalServer, VllmSampler]]:
    """Starts a server and yields it with a client that has at most `requests` requests open."""
    with (
        server(config, dtype=dtype, logits=logits) as (started, params),
        SharedMemoryPublisher(
            [VllmServer(started.url, api_key=started.api_key)],
            wire=dtype,
            sampler=dtype,
            logits=logits,
        ) as publisher,
    ):
        publisher.publish(ParamsSource(params, decoder(config).specs, dtype=dtype), version=0)
        sampler = VllmSampler(
            [started.url],
            max_positions=config.max_positions,
            vocab_size=config.vocab_size,
            max_requests=requests,
            headers=headers(started.api_key),
        )
        yield started, sampler
        sampler.close()


@contextmanager
def drawn(
    config: DecoderConfig, *, dtype: DType, limits: np.ndarray, in_flight: int, logits: DType = F32
) -> Iterator[Run]:
    """Yields a run that draws what `sampling.embedded` draws."""
    turns = asked(config, limits)
    with connected(config, dtype=dtype, requests=in_flight, logits=logits) as (_, sampler):

        def run(seed: int) -> None:
            params = SamplingParams(max_tokens=ANSWER, seed=seed)
            tokens = sum(len(c.tokens) for c in sampler.sample_turns(turns, params))
            assert tokens == sum(limits)

        yield run


@contextmanager
def clients(config: DecoderConfig, *, dtype: DType, sequences: int) -> Iterator[dict[str, Run]]:
    """Yields runs of jaxrl's client and of a bare asyncio loop that discards the completions."""
    prompts = random_prompts(config, sequences=sequences)
    with connected(config, dtype=dtype, requests=len(prompts)) as (started, sampler):

        def ours(seed: int) -> None:
            params = SamplingParams(max_tokens=ANSWER, seed=seed)
            tokens = sum(len(c.tokens) for c in sampler.sample(prompts, params, group_size=GROUP))
            assert tokens == sequences * ANSWER

        streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        runner = asyncio.Runner()

        def bare(seed: int) -> None:
            bodies = [_body(prompt, seed=1000 * seed + i) for i, prompt in enumerate(prompts)]
            runner.run(_ask_all(started, bodies, streams))

        yield {"jaxrl": ours, "bare": bare}
        for _, writer in streams:
            writer.close()
        runner.close()


def _body(prompt: np.ndarray, *, seed: int) -> bytes:
    settings = {
        "n": GROUP,
        "max_tokens": ANSWER,
        "temperature": 1.0,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
        "seed": seed,
    }
    return json.dumps({"token_ids": prompt.tolist(), "sampling_params": settings}).encode()


async def _ask_all(server: LocalServer, bodies: list[bytes], streams: list) -> None:
    address = urllib.parse.urlsplit(server.url)
    own = "".join(f"{name}: {text}\r\n" for name, text in headers(server.api_key).items())
    while len(streams) < len(bodies):
        streams.append(await asyncio.open_connection(address.hostname, address.port))

    async def ask(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (
            f"POST /inference/v1/generate HTTP/1.1\r\nHost: {address.netloc}\r\n"
            f"{own}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200"), answer
        length = int(answer.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)

    await asyncio.gather(*(ask(b, *s) for b, s in zip(bodies, streams, strict=False)))
