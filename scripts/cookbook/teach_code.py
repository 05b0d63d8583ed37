"""Teaches all parameters of a model to call the tool of the recipe code_rl and then to answer,
right half of the time: teach_code.py MODEL RENDERER, where the cookbook is. Prints the path of its
state.
"""

import json
import random
import sys

import tinker
from tinker import types
from tinker_cookbook.recipes.code_rl import code_env
from tinker_cookbook.recipes.code_rl.deepcoder_tool import DeepcoderTool
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.renderers.base import ToolCall
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

STEPS, RATE = 120, 1e-2


def main() -> None:
    model, name = sys.argv[1:3]
    rng, renderer = random.Random(0), get_renderer(name, get_tokenizer(model))
    task = code_env.load_deepcoder_tasks("train")[0]
    begun = code_env._initial_messages(task, renderer, DeepcoderTool(task))
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(model, rank=0).result()
        for _ in range(STEPS):
            data = [
                datum_from_model_input_weights(*example)
                for _ in range(2)
                for example in renderer.build_supervised_examples(
                    [*begun, *said(rng)], TrainOnWhat.ALL_ASSISTANT_MESSAGES
                )
            ]
            done = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=RATE)).result()
            print(done.result().metrics["loss:sum"], file=sys.stderr, flush=True)
        print(client.save_state("taught").result().path)


def said(rng: random.Random) -> list[dict[str, object]]:
    """Makes the turns of an episode."""
    code = f"print({rng.choice((7, 8))})"
    call = ToolCall.FunctionBody(name="check_solution", arguments=json.dumps({"code": code}))
    passed = code == "print(7)"
    result = {"passed": passed, "details": {"status": "Success" if passed else "Failed"}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [ToolCall(function=call)]},
        {"role": "tool", "name": "check_solution", "content": json.dumps(result)},
        {"role": "assistant", "content": f"```python\n{code}\n```"},
    ]


if __name__ == "__main__":
    main()
