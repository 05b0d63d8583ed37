"""vLLM in this process, told what to do by JSON lines; runs in .venv-vllm, without jax.

Usage: python vllm_child.py MODEL_DIR DTYPE. One request a line on the standard input,
{"call": name, ...arguments}; one answer a line: {"ok": result} or {"error": message}.
"""

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to the standard output
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        TORCH_COMPILE_DISABLE="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams

    model, dtype = sys.argv[1:]
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=16 << 20,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": "jaxrl"},
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, detokenize=False)

    def connect(root: str, wire: str, sampler: str) -> None:
        info = {"root": root, "wire": wire, "sampler": sampler}
        llm.init_weight_transfer_engine({"init_info": info})

    def update(payload: str, version: int) -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"payload": payload, "version": version}})
        llm.finish_weight_update(str(version))
        llm.reset_prefix_cache()

    def generate(prompts: list[list[int]]) -> list:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False
        )
        found = [output.outputs[0] for output in outputs]
        return [
            [
                list(c.token_ids),
                [p[t].logprob for p, t in zip(c.logprobs, c.token_ids, strict=True)],
            ]
            for c in found
        ]

    def fail_after(tensors: int) -> None:
        """The next load raises when it has taken this many tensors."""
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        network = runner.get_model()
        whole = network.load_weights

        def broken(weights):
            network.load_weights = whole

            def some():
                for i, weight in enumerate(weights):
                    if i == tensors:
                        raise OSError("the memory went away")
                    yield weight

            return whole(some())

        network.load_weights = broken

    def loaded_modules() -> list[str]:
        return sorted({"jax", "flax"} & sys.modules.keys())

    calls = (connect, update, generate, fail_after, loaded_modules, llm.get_weight_version)
    table = {call.__name__: call for call in calls}
    print(json.dumps({"ok": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": table[request.pop("call")](**request)}
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
