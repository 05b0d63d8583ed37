"""The `jaxrl` command."""

import argparse
import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence

import jaxrl
from jaxrl.commands import COMMANDS, load_command
from jaxrl.commands.compile_cache import use_compile_cache
from jaxrl.core import nearest

HELP = f"""usage: jaxrl COMMAND [options]

{chr(10).join(f"  {name:14}{text}" for name, text in COMMANDS.items())}

Run `jaxrl COMMAND --help` for its options and `jaxrl --version` for the version. Set
JAXRL_TRACEBACK=1 to get tracebacks with errors.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0 is success, 1 an error, 2 an unreadable command line, 3 and 4 a pause and a stop by an alarm
    (`jaxrl train` and `watch`), 3 also a certificate or a bound that was missed (`jaxrl doctor`), 5
    a run that does not fit (`jaxrl plan`), and 128 + N the end by signal N.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if name == "--version":
        print(f"jaxrl {jaxrl.__version__}")
        return 0
    if name not in COMMANDS:
        print(_unknown(name) if name else HELP, file=sys.stderr)
        return 2
    use_compile_cache()
    verbose = "--verbose" in arguments
    logging.getLogger("jaxrl").setLevel(logging.INFO if verbose else logging.NOTSET)
    if not verbose:
        # Of XLA's own log only crashes: errors become exceptions, and the rest, such as a box about
        # each program that takes two minutes to compile, is news to XLA's developers alone.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        status = load_command(name).main(arguments[1:])
        _flush()
        return status
    except KeyboardInterrupt:
        print(f"jaxrl {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # e.g. `jaxrl config FILE | head`
        _drop_output()
        return 141
    except SystemExit as end:
        # argparse exits this way; a user's function must not exit without a message.
        *_, last = traceback.extract_tb(end.__traceback__)
        if last.filename == argparse.__file__:
            raise
        place = f"{last.filename}:{last.lineno}"
        print(f"jaxrl {name}: {place} called exit({end.code!r})", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError, FloatingPointError, ModuleNotFoundError) as error:
        if os.environ.get("JAXRL_TRACEBACK"):
            raise
        text = str(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
            text = f"{error.strerror}; make room where it writes"
        print(f"jaxrl {name}: {text}", file=sys.stderr)
        return 1


def _unknown(name: str) -> str:
    """Returns the error for an unknown command, which names the nearest one."""
    if near := nearest(name, COMMANDS):
        return f"jaxrl: unknown command {name!r}; did you mean {near}?"
    return f"jaxrl: unknown command {name!r}\n\n{HELP}"


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # e.g. `jaxrl config FILE > FULL_DISK/FILE`
        _drop_output()
        raise OSError(error.errno, error.strerror, "standard output") from error


def _drop_output() -> None:
    """Discards the rest of the output, which Python would fail to print again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
