"""Serves a model to clients of the Tinker API: they train it and sample from it.

  jaxrl tinker MODEL_DIR --port 8000 --precision bf16_master

Prints the two environment variables that the official client reads. Several tenants share the
model, each with adapters of its own. See docs/tinker.md."""

import argparse
import contextlib
import logging
import os
import secrets
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.bridge import free_port, is_loopback
from jaxrl.commands import options
from jaxrl.commands.report.command import charts, render
from jaxrl.config import toml_file
from jaxrl.config.tinker import TinkerConfig
from jaxrl.core import Hosts
from jaxrl.huggingface import hub
from jaxrl.training import cluster
from jaxrl.training.run_directory import check_shared

KEY = "TINKER_API_KEY"


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.parser("tinker", TinkerConfig, description=__doc__, usage="MODEL_DIR")
    text = "directory of a Hugging Face model, or its name on the hub"
    made.add_argument("model_dir", metavar="MODEL_DIR", help=text)
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    config, arguments = options.parse_arguments(parser(), TinkerConfig, argv)
    try:
        from jaxrl.service.serving import follow_service
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed; pip install 'jaxrl[tinker]'"
        ) from None
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    state, model_dir = Path(config.state_dir), hub.local_directory(arguments.model_dir)
    name = config.name or arguments.model_dir
    with cluster.joined(config.hosts, same=toml_file.flatten(config)):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
        hosts = Hosts()
        hosts.on_leader(lambda: state.mkdir(parents=True, exist_ok=True))
        check_shared(state, hosts, key="state_dir")
        if hosts.leads:
            _lead(config, model_dir, name=name, state=state)
        else:
            follow_service(config, model_dir, name=name, directory=state)
    return 0


def _lead(config: TinkerConfig, model_dir: str, *, name: str, state: Path) -> None:
    """Serves clients, with the devices of all processes."""
    from jaxrl.service.live import Page
    from jaxrl.service.serving import open_service

    keys = find_keys(config.host, state)
    port = config.port or free_port(config.host, 0)
    page = Page(render, charts)
    opened = open_service(config, model_dir, name=name, keys=keys, directory=state, page=page)
    with opened as app:
        lines = f"export TINKER_BASE_URL=http://{config.host}:{port}\nexport {KEY}={keys[0]}"
        _serve(app, host=config.host, port=port, ready=lines)


def _serve(app: Any, *, host: str, port: int, ready: str) -> None:
    """Serves until a signal; prints `ready` once clients can connect."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            print(ready, flush=True)

        async def shutdown(self, sockets: Any = None) -> None:
            for poll in app.state.polls:
                poll.set()
            await super().shutdown(sockets)

    settings = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5
    )
    with contextlib.suppress(KeyboardInterrupt):
        Server(settings).run()


def find_keys(host: str, state: Path) -> list[str]:
    """Returns the keys that clients may use: those of the environment variable, with commas in
    between, or one that is made once and kept beside the state.

    Raises:
      ValueError: without a key on an address that other machines reach, or for a key without the
        prefix that the client asks for.
    """
    given = [key for key in os.environ.get(KEY, "").split(",") if key]
    if given:
        for key in given:
            if not key.startswith("tml-"):
                raise ValueError(f"{KEY}: a key must begin with 'tml-', or the client refuses it")
        return given
    if not is_loopback(host):
        raise ValueError(f"host = {host!r} is open to other machines; set {KEY} to a key 'tml-...'")
    file = state / "key"
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(f"tml-{secrets.token_hex(16)}\n")
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        raise ValueError(f"{file} can be read by other users; remove it, or set {KEY}")
    return [file.read_text().strip()]
