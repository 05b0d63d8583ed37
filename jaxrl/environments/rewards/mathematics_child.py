"""Child process of `mathematics.py`: compares expressions with the package math-verify.

Arguments: seconds of processor time per comparison, bytes of memory. The first line of output is
true once the package is loaded, or a string with the error. Each line of input is a JSON list of a
reference answer and a completion. Each is answered by one line of JSON: true or false, null if the
reference answer contains no expression, or a string with the error.
"""

import json
import os
import resource
import signal
import sys
from typing import Any


def main() -> None:
    """Reads comparisons from stdin and writes their results to stdout."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything a library prints goes to stderr

    def say(what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        from math_verify import parse, verify
    except Exception as error:
        return say(repr(error))
    say(True)
    for line in sys.stdin:
        reference, completion = json.loads(line)
        # The library's own limit is a signal that Python handles between two operations, but one
        # operation on integers can take hours. This signal has no handler, so it ends the process.
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
