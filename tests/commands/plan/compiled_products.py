"""Compiles the learner's step for a chip under several precisions and prints its products as JSON.

python -m tests.commands.plan.compiled_products TOPOLOGY MODEL_DIR POLICY...
"""

import json
import re
import sys

from jaxrl.commands.plan.step import make_step
from jaxrl.commands.plan.topology import open_topology
from jaxrl.core.compiled import jit
from tests.run_config import run_config


def main() -> None:
    topology, model, *precisions = sys.argv[1:]
    found = {}
    for text in precisions:
        own = {
            "model.path": model,
            "data.max_prompt_tokens": 128,
            "sampling.max_tokens": 128,
            "train.train_batch": 2,
            "train.microbatch_tokens": 256,
            "train.attention": "xla",
            "mesh.fsdp": 4,
            "precision": text,
        }
        config = run_config(model, **own)
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
            assert not re.search(r'custom_call_target="[^"]*(gemm|cublas)', line), line
        found[text] = products
    print(json.dumps(found))


if __name__ == "__main__":
    main()
