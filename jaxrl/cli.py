"""The `jaxrl` command."""

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from jaxrl.commands.compile_cache import use_compile_cache

# Modules of jaxrl.commands, imported when they are called: --help answers at once.
COMMANDS = {
    "sft": "fine-tune a model on texts",
    "reward-model": "train a reward model on pairs of answers",
    "dpo": "tune a model on pairs of answers",
    "train": "train a model with reinforcement learning",
    "eval": "measure a model's greedy accuracy on held-out prompts",
    "generate": "sample answers of a model to prompts",
    "filter": "keep the prompts that a model answers right sometimes",
    "doctor": "measure what each dtype policy does to the importance ratio",
    "serve": "run a vLLM server that takes weights from a learner",
    "export": "write a training run's checkpoint as a Hugging Face model",
    "plan": "compile a run's step for chips that need not exist: does it fit, how fast is it",
    "watch": "show a run from another terminal while it goes on",
    "report": "write a page that shows what happened in one or several runs",
    "losses": "list the algorithms with their formulas and parameters",
    "config": "print a resolved config",
}

HELP = f"""usage: jaxrl COMMAND [options]

{chr(10).join(f"  {name:14}{text}" for name, text in COMMANDS.items())}

`jaxrl COMMAND --help` shows every option. Set JAXRL_TRACEBACK=1 to see where an error came from.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 after an error in what the user gave, 2 for a
    command line that cannot be read, 3 and 4 after an alarm (`jaxrl train`), 128 + the signal's
    number after a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if name not in COMMANDS:
        print(f"jaxrl: there is no command {name!r}\n\n{HELP}" if name else HELP, file=sys.stderr)
        return 2
    use_compile_cache()
    try:
        return load(name).main(arguments[1:])
    except KeyboardInterrupt:
        print(f"jaxrl {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # such as `jaxrl config FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if os.environ.get("JAXRL_TRACEBACK"):
            raise
        print(f"jaxrl {name}: {error}", file=sys.stderr)
        return 1


def load(name: str) -> ModuleType:
    """Imports the module of a command: its file, or `command.py` in its folder."""
    path = "jaxrl.commands." + name.replace("-", "_")
    module = importlib.import_module(path)
    return importlib.import_module(path + ".command") if hasattr(module, "__path__") else module


if __name__ == "__main__":
    sys.exit(main())
