"""Compares expressions mathematically: run by `mathematics.py`, with the package math-verify.

Arguments: seconds, memory. Each line of standard input is a JSON list of a reference answer and a
completion. The reply is a line of JSON: true or false for equality, null if the reference answer
contains no expression, or the text of an error. The very first line is true once the package is
imported, or the text of the error.
"""

import json
import os
import resource
import signal
import sys
from typing import Any


def main() -> None:
    """Answers questions until standard input ends."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of libraries out of the replies

    def reply(value: Any) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        from math_verify import parse, verify
    except Exception as error:
        return reply(repr(error))
    reply(True)
    for line in sys.stdin:
        reference, completion = json.loads(line)
        # Python would handle the library's own timeout signal between two operations, but one
        # operation on integers can take hours. This signal has no handler: it kills the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            expected = parse(reference, parsing_timeout=0)
            found = parse(completion, parsing_timeout=0)
            reply(bool(verify(expected, found, timeout_seconds=0)) if expected else None)
        except MemoryError:
            reply(False)
        except Exception as error:
            reply(repr(error))
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
