"""Opens a service: the model, its engine and the application."""

import functools
import hashlib
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from jaxrl.bridge import known_key, new_learner
from jaxrl.builders.layout import make_layout, prepare_devices, sampler_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.servers import starting_server
from jaxrl.config.sampler import SamplerConfig, ServerConfig
from jaxrl.config.tinker import TinkerConfig
from jaxrl.huggingface import Checkpoint
from jaxrl.models import Wanted
from jaxrl.service.app import Service, application
from jaxrl.service.downloads import download_routes
from jaxrl.service.engine import Engine
from jaxrl.service.files import Files
from jaxrl.service.gateway import Gateway
from jaxrl.service.listing import listing_routes
from jaxrl.service.live import Page, live_routes
from jaxrl.service.pool import Base
from jaxrl.service.sampling import Backend, Embedded, Samplers
from jaxrl.service.servers import Servers
from jaxrl.service.state import Store

_STARTED_RANK = 64  # the largest of adapters on a server that the service starts


def kernel_for_tenants(wanted: Wanted, *, platform: str) -> Wanted:
    """Returns the kernel of attention that tenants' adapters are computed with: jax cannot
    vectorise cuDNN's over tenants.

    Raises:
      ValueError: for `cudnn`.
    """
    if wanted == "cudnn":
        raise ValueError(
            "attention = 'cudnn': it cannot compute several tenants at once; use 'auto' or 'xla'"
        )
    return "xla" if platform == "gpu" else wanted


@contextmanager
def open_service(
    settings: TinkerConfig,
    model_dir: str | Path,
    *,
    name: str,
    keys: Sequence[str],
    directory: Path,
    page: Page,
) -> Iterator[Starlette]:
    """Loads a model and serves it for the block.

    Args:
      settings: the keys of the command.
      model_dir: a Hugging Face checkpoint.
      name: the model's name for clients.
      keys: the keys that clients may use; each sees what was made with it.
      directory: of the state, which an earlier service may have left.
      page: of live training runs.

    Raises:
      RuntimeError: after the block, if requests could not be answered any more.
    """
    checkpoint, precision = Checkpoint(model_dir), settings.precision
    prepare_devices(settings.mesh, SamplerConfig())
    layout = make_layout(settings.mesh, precision=precision)
    platform = layout.mesh.devices.flat[0].platform
    model, params = load_model(
        checkpoint,
        layout=layout,
        dtype=precision.wire,
        remat=settings.remat,
        attention=kernel_for_tenants(settings.attention, platform=platform),
    )
    base = Base(model, params, precision, layout)
    with ExitStack() as closing:
        store = Store(directory / "state.sqlite")
        closing.callback(store.close)
        files = Files(directory, base_name=name)
        opened = _backend(settings, base, checkpoint, directory=directory, files=files)
        backend = closing.enter_context(opened)
        engine = Engine(
            base,
            store=store,
            files=files,
            samplers=functools.partial(_samplers, base, checkpoint, backend),
            microbatch_tokens=settings.microbatch_tokens,
            max_batch=settings.max_batch,
            slots=settings.slots,
            snapshot_seconds=settings.snapshot_seconds,
        )
        closing.callback(engine.close)
        owners = {key: hashlib.sha256(key.encode()).hexdigest()[:16] for key in keys}
        service = Service(engine, name, Path(model_dir).resolve(), owners, settings.seed)
        gateway = Gateway(service, checkpoint.tokenizer)
        more = [*listing_routes(service), *download_routes(service)]
        more += [*live_routes(service, page), *gateway.routes()]
        yield application(service, more)
        if engine.fault is not None:
            raise RuntimeError(
                f"the server could not go on: {engine.fault}; mend the cause and start it again "
                "with the same state_dir"
            )


def _samplers(
    base: Base, checkpoint: Checkpoint, backend: Backend, load: Callable[[str], Any]
) -> Samplers:
    return Samplers(
        base, tokenizer=checkpoint.tokenizer, end_ids=checkpoint.end_ids, load=load, backend=backend
    )


@contextmanager
def _backend(
    settings: TinkerConfig, base: Base, checkpoint: Checkpoint, *, directory: Path, files: Files
) -> Iterator[Backend]:
    """Opens the sampler that the config names, with the base's weights."""
    if settings.sampler == "embedded":
        own, sums = None, base.precision.sums
        if base.layout.mesh.size > 1:
            own = sampler_layout(SamplerConfig(), base.layout, base.model, sums=sums)
        yield Embedded(base, max_batch=settings.max_batch, layout=own)
        return
    with ExitStack() as closing:
        urls, key = settings.sampler.split(","), known_key()
        if settings.sampler == "vllm":
            starting = starting_server(
                ServerConfig(),
                checkpoint,
                dtype=base.precision.sampler,
                blocks=base.precision.blocks,
                log=directory / "vllm.log",
                note=functools.partial(print, file=sys.stderr),
                completions=settings.max_batch,
                max_lora_rank=_STARTED_RANK,
            )
            server = closing.enter_context(starting).wait()
            urls, key = [server.url], server.api_key
        learner = new_learner(f"{directory.resolve()} on {socket.gethostname()}")
        servers = Servers(base, urls, key=key, learner=learner, directory=files.checkpoint)
        closing.callback(servers.close)
        servers.load(base.params)
        yield servers
