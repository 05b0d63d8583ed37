"""Compares expressions as mathematics: run by `mathematics.py`, with the package math-verify.

Arguments: seconds, memory. Each line of the standard input is a JSON list of a reference answer and
a completion. A line answers it, JSON: whether the completion's expression equals that of the
reference answer, null if that holds none, or in words what was raised. The first line of all is
true once the package is loaded, or in words why it cannot be.
"""

import json
import os
import resource
import signal
import sys
from typing import Any


def main() -> None:
    """See above."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        from math_verify import parse, verify
    except Exception as error:
        return say(repr(error))
    say(True)
    for line in sys.stdin:
        reference, completion = json.loads(line)
        # The library's own limit is by a signal that Python handles between two operations, and one
        # operation on whole numbers can take hours. This one nobody handles: it ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            expected = parse(reference, parsing_timeout=0)
            found = parse(completion, parsing_timeout=0)
            say(bool(verify(expected, found, timeout_seconds=0)) if expected else None)
        except MemoryError:
            say(False)
        except Exception as error:
            say(repr(error))
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
