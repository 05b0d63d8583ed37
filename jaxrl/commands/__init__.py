"""The subcommands of `jaxrl`, imported on demand so that --help is quick."""

import importlib
from types import ModuleType

COMMANDS = {
    "init": "write a config, a reward and sample data to start from",
    "train": "train a model with reinforcement learning",
    "sft": "fine-tune a model on texts",
    "dpo": "train a model on preference pairs (DPO)",
    "reward-model": "train a reward model on preference pairs",
    "eval": "measure accuracy, and keep the prompts that a model solves sometimes",
    "generate": "sample completions for prompts",
    "data": "show what a model reads: rows, lengths, special and trained tokens",
    "doctor": "measure how each dtype policy distorts the importance ratio",
    "bench": "measure the accelerator that is there, with random weights",
    "plan": "compile a run's step for chips you do not have: memory and speed",
    "serve": "run vLLM servers that accept weights from a learner",
    "tinker": "serve a model to clients of the Tinker API, which train it",
    "export": "write a checkpoint as a Hugging Face model",
    "fleet": "change the number of workers of a run on a cluster",
    "watch": "follow a run from another terminal",
    "report": "write an HTML page about one or more runs",
    "losses": "list the algorithms with their formulas and parameters",
    "config": "print a resolved config",
    "completion": "print a script that completes commands and keys in bash or zsh",
}


def load_command(name: str) -> ModuleType:
    """Imports a command's module: its file, or `command.py` in its folder."""
    path = "jaxrl.commands." + name.replace("-", "_")
    module = importlib.import_module(path)
    return importlib.import_module(path + ".command") if hasattr(module, "__path__") else module
