"""Runs vLLM in this process, controlled by JSON lines; runs in .venv-vllm, without jax.

Each line of standard input is a request, {"call": name, ...arguments}. Each line of standard output
is a response, {"ok": result} or {"error": message}.
"""

import contextlib
import ctypes
import gc
import json
import os
import platform
import sys
from collections import deque
from pathlib import Path


class Engine:
    """A vLLM engine with one model."""

    def open(
        self, model: str, dtype: str, logprobs_mode: str, head: str, quantization: str | None
    ) -> None:
        from vllm import LLM

        self.llm = None  # free the old one first
        self.llm = LLM(
            model,
            dtype=dtype,
            quantization=quantization,
            max_model_len=128,
            max_num_seqs=8,
            enforce_eager=True,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=16 << 20,
            logprobs_mode=logprobs_mode,
            hf_overrides={"head_dtype": head},
            weight_transfer_config={"backend": "jaxrl"},
        )

    def connect(self, **info) -> None:
        self.llm.init_weight_transfer_engine({"init_info": info})

    def update(self, **info) -> None:
        self.llm.start_weight_update()
        self.load(info)
        self.llm.finish_weight_update(str(info["version"]))
        self.llm.reset_prefix_cache()

    def start(self) -> None:
        self.llm.start_weight_update()

    def load(self, info) -> None:
        self.llm.update_weights({"update_info": info})

    def finish(self, version: str) -> None:
        self.llm.finish_weight_update(version)

    def disconnect(self) -> None:
        self.llm.llm_engine.collective_rpc("shutdown_weight_transfer_engine")

    def version(self) -> str:
        return self.llm.get_weight_version()

    def generate(self, prompts: list[list[int]]) -> list:
        """Returns greedy tokens and their log-probs."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(temperature=0.0, max_tokens=24, logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        found = [output.outputs[0] for output in outputs]
        return [
            [
                list(c.token_ids),
                [p[t].logprob for p, t in zip(c.logprobs, c.token_ids, strict=True)],
            ]
            for c in found
        ]

    def margins(self, prompts: list[list[int]]) -> list[float]:
        """Returns the two largest logits' difference at each greedy token."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, detokenize=False),
            use_tqdm=False,
        )
        positions = [token for output in outputs for token in output.outputs[0].logprobs]
        return [first - second for first, second in map(_two_largest, positions)]

    def fail_after(self, tensors: int) -> None:
        """Makes the next load raise after this many tensors."""

        def fail():
            raise OSError("the memory went away")

        self._after(tensors, fail)

    def remove_after(self, tensors: int, file: str, again: bool) -> None:
        """Has a file removed in the next load after this many tensors, and written `again`."""

        def remove():
            content = Path(file).read_bytes()
            Path(file).unlink()
            if again:
                Path(file).write_bytes(content)

        self._after(tensors, remove)

    def fails_elsewhere(self, at: int, text: str) -> None:
        """Makes another worker report an error, at its check (0) or at its load (1)."""
        from jaxrl.bridge.in_vllm import engine

        calls = iter(range(at + 1))

        def in_others(own: str) -> str:
            if next(calls) < at:
                return own
            engine._in_others = whole
            return own or text

        whole, engine._in_others = engine._in_others, in_others

    def unread_answers(self, failing: list[bool]) -> list:
        """Calls workers, some of which fail, through vLLM's executor; returns (the error, the
        number of answers that it left unread)."""
        queues = [Answers() for _ in failing]
        executor = executor_of(queues, failing=failing)
        error = ""
        try:
            executor.collective_rpc("a_method")
        except RuntimeError as raised:
            error = str(raised)
        assert executor.response_mqs is queues
        return [error, sum(map(len, queues))]

    def woken_by_a_death(self) -> list[bool]:
        """Ends vLLM's executor during a call, as its monitor does after a worker has died; returns
        which workers' queues it woke, and if the monitor came to its end."""
        queues = [Answers(), Answers()]
        executor = executor_of(queues, failing=[False, False])
        ended = []

        def die(timeout=None):
            executor.shutdown()
            ended.append(True)
            raise RuntimeError("cancelled")

        queues[0].dequeue = die
        with contextlib.suppress(RuntimeError):
            executor.collective_rpc("a_method")
        return [*(queue.woken for queue in queues), bool(ended)]

    def forbidden_tiles(self) -> bool:
        """True if the processor has tiles (AMX) that Linux does not let this process use."""
        from jaxrl.bridge.in_vllm import plugin

        plugin.register()
        masks = ctypes.c_uint64(), ctypes.c_uint64()
        if platform.machine() == "x86_64":
            for code, mask in zip((0x1021, 0x1022), masks, strict=True):  # supported, permitted
                ctypes.CDLL(None).syscall(158, code, ctypes.byref(mask))  # arch_prctl
        supported, permitted = (mask.value >> 18 & 1 for mask in masks)
        return supported > permitted

    def _after(self, tensors: int, act) -> None:
        network = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        whole = network.load_weights

        def interrupted(weights):
            network.load_weights = whole

            def some():
                for i, weight in enumerate(weights):
                    if i == tensors:
                        act()
                    yield weight

            return whole(some())

        network.load_weights = interrupted

    def loaded_modules(self) -> list[str]:
        return sorted({"jax", "flax"} & sys.modules.keys())


class Answers(deque):
    """A worker's queue of answers."""

    woken = False

    def dequeue(self, timeout=None):
        return self.popleft()

    def shutdown(self):
        self.woken = True


def executor_of(queues: list[Answers], *, failing: list[bool]):
    """Makes vLLM's executor of workers without processes, some of which fail at each call."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    from jaxrl.bridge.in_vllm import plugin

    plugin.register()
    status = WorkerProc.ResponseStatus

    class Calls(Answers):
        def enqueue(self, call):
            for i, (queue, fails) in enumerate(zip(queues, failing, strict=True)):
                queue.append((status.FAILURE if fails else status.SUCCESS, f"worker {i}"))

    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq, executor.response_mqs = Calls(), queues
    return executor


def _two_largest(found) -> list[float]:
    return sorted((one.logprob for one in found.values()), reverse=True)[:2]


def main() -> None:
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        TORCH_COMPILE_DISABLE="1",
        HF_HUB_OFFLINE="1",
    )
    # vLLM collects garbage eight times per start, a third of a second each, to no effect here.
    gc.collect = lambda generation=2: 0
    engine = Engine()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            response = {"ok": getattr(engine, request.pop("call"))(**request)}
        except Exception as error:
            response = {"error": str(error)}
        print(json.dumps(response), file=responses, flush=True)


if __name__ == "__main__":
    main()
