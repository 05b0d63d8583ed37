"""What the processes of tests/processes.py have imported."""

import importlib
import os
import sys

sys.modules["torch"] = None  # transformers would import it: seconds
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as jaxrl/huggingface/tokenizer.py sets it

for module in (
    "matplotlib.pyplot",
    "jaxrl.commands.train",
    "jaxrl.commands.dpo",
    "jaxrl.train",
    "tests.bridge.store.hosts",
    "transformers.models.auto.tokenization_auto",
):
    importlib.import_module(module)
