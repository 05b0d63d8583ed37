"""The run of a program's source."""

import sys
import types


def run_source(source: bytes, module: types.ModuleType) -> None:
    """Runs a program in a module; ends the process if it raises."""
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except Exception as error:
        import traceback

        shown = error.__traceback__ and error.__traceback__.tb_next  # without this function
        traceback.print_exception(type(error), error, shown)
        sys.exit(1)
