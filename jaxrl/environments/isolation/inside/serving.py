"""The side of the code under test: runs it as a module, then answers the tests' questions."""

from __future__ import annotations

import io
import sys
import types

from .operations import OPERATIONS
from .peer import Peer
from .source import run_source

TYPE_CHECKING = False  # importing typing takes time at every start
if TYPE_CHECKING:
    from typing import Any


def serve(source: bytes, pipes: list[int]) -> None:
    """Runs the code; if it does not raise, answers until the tests end."""
    peer = Peer(*pipes)
    module = types.ModuleType("program")
    run_source(source, module)

    def names(wanted: list[str]) -> dict[str, Any]:
        return {name: vars(module)[name] for name in wanted if name in vars(module)}

    OPERATIONS["names"] = names
    # The code's output is sent with its answers, so that tests can capture it.
    sys.stdout = prints = io.StringIO()

    def printed() -> str:
        text = prints.getvalue()
        prints.seek(0)
        prints.truncate()
        return text

    peer.printed = printed
    peer.serve()
