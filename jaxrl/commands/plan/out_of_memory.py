"""The compiler's out-of-memory errors."""

import re

from jaxrl.commands.plan.chips import GIB


def needed_memory(message: str) -> float | None:
    """Parses the bytes of a program from the compiler's error; None if the error is another one."""
    match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds available HBM)", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    return float(match[1]) * GIB * 1024.0 ** ("KMGT".index(match[2]) - 2)
