"""Compiles the learner's step for a chip under several precisions and prints its products as JSON.

python -m tests.commands.plan.compiled_products TOPOLOGY MODEL_DIR POLICY...
"""

import json
import re
import sys

from jaxrl.commands.plan.step import make_step
from jaxrl.commands.plan.topology import open_topology
from jaxrl.config.training import Config
from jaxrl.core.precision import jit


def main() -> None:
    topology, model, *precisions = sys.argv[1:]
    found = {}
    for text in precisions:
        config = Config.model_validate(
            {
                "model": {"path": model},
                "data": {"path": "d", "max_prompt_tokens": 128},
                "reward": {"path": ["exact_match"]},
                "sampling": {"max_tokens": 128},
                "train": {
                    "train_batch": 2,
                    "group_size": 4,
                    "microbatch_tokens": 256,
                    "attention": "xla",
                },
                "mesh": {"fsdp": 4},
                "precision": text,
            }
        )
        step = make_step(config, open_topology(topology))
        program = jit(step.learner.step).lower(step.state, step.minibatch).compile().as_text() or ""
        types = dict(re.findall(r"%(\S+) = (\w+)\[", program))
        types |= dict(re.findall(r"(\w[\w.]*): (\w+)\[", program))
        products = []
        for line in program.splitlines():
            # A product is a convolution on a TPU.
            match = re.search(r" (?:dot|convolution)\(%(\S+), %(\S+)\)", line)
            if match is not None:
                highest = "operand_precision={highest,highest}" in line
                products.append([*(types[name] for name in match.groups()), highest])
            # A library would multiply as it likes.
            assert "gemm" not in line or "custom_call_target" not in line, line
        found[text] = products
    print(json.dumps(found))


if __name__ == "__main__":
    main()
