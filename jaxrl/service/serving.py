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
from jaxrl.builders.model import check_precision, load_model
from jaxrl.builders.servers import starting_server
from jaxrl.config.sampler import SamplerConfig, ServerConfig
from jaxrl.config.tinker import TinkerConfig
from jaxrl.core import Hosts
from jaxrl.huggingface import Checkpoint
from jaxrl.models import Wanted
from jaxrl.service.app import Service, application
from jaxrl.service.backends import Backend, Elsewhere, Embedded
from jaxrl.service.devices import Devices
from jaxrl.service.downloads import download_routes
from jaxrl.service.engine import Engine
from jaxrl.service.files import Files, Saved
from jaxrl.service.gateway import Gateway
from jaxrl.service.listing import listing_routes
from jaxrl.service.live import Page, live_routes
from jaxrl.service.pool import Base
from jaxrl.service.processes import Processes
from jaxrl.service.sampling import Samplers
from jaxrl.service.servers import Servers
from jaxrl.service.stacks import to_host
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
      ValueError: if another server has the state, or it is another model's or precision's.
      RuntimeError: after the block, if requests could not be answered any more.
    """
    with ExitStack() as closing:
        store = Store(directory / "state.sqlite")
        closing.callback(store.close)
        made_with = {"precision": str(settings.precision), **Checkpoint(model_dir).fingerprint()}
        store.claim(made_with)
        files = Files(directory, base_name=name)
        opened = _devices(settings, model_dir, directory=directory, files=files)
        devices, checkpoint = closing.enter_context(opened)
        closing.enter_context(devices.processes.leading())
        engine = Engine(
            devices,
            store=store,
            files=files,
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


def follow_service(
    settings: TinkerConfig, model_dir: str | Path, *, name: str, directory: Path
) -> None:
    """Does the work of a process other than 0 until process 0 ends, see `open_service`.

    Raises:
      RuntimeError: if process 0 failed.
    """
    files = Files(directory, base_name=name)
    with _devices(settings, model_dir, directory=directory, files=files) as (devices, _):
        devices.processes.follow(devices, devices.samplers)


@contextmanager
def _devices(
    settings: TinkerConfig, model_dir: str | Path, *, directory: Path, files: Files
) -> Iterator[tuple[Devices, Checkpoint]]:
    """Loads the model and opens its sampler; all processes must call it."""
    checkpoint, precision = Checkpoint(model_dir), settings.precision
    check_precision("precision", precision, checkpoint.config)
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
    base, processes = Base(model, params, precision, layout), Processes()

    def samplers(load: Callable[[Saved], Any]) -> Samplers:
        return Samplers(
            base,
            tokenizer=checkpoint.tokenizer,
            end_ids=checkpoint.end_ids,
            load=load,
            backend=backend,
            processes=processes,
        )

    with _backend(settings, base, checkpoint, directory=directory, files=files) as backend:
        yield (
            Devices(
                base,
                files=files,
                samplers=samplers,
                microbatch_tokens=settings.microbatch_tokens,
                processes=processes,
            ),
            checkpoint,
        )


@contextmanager
def _backend(
    settings: TinkerConfig, base: Base, checkpoint: Checkpoint, *, directory: Path, files: Files
) -> Iterator[Backend]:
    """Opens the sampler that the config names, with the base's weights. Process 0 alone has one on
    servers."""
    if settings.sampler == "embedded":
        own, sums = None, base.precision.sums
        if base.layout.mesh.size > 1:
            own = sampler_layout(SamplerConfig(), base.layout, base.model, sums=sums)
        yield Embedded(base, max_batch=settings.max_batch, layout=own)
        return
    weights, leads = base.params, Hosts().leads
    if Hosts().count > 1:
        weights = to_host(weights, keep=leads)
    if not leads:
        yield Elsewhere()
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
        servers.load(weights)
        yield servers
