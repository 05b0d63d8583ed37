"""Entry point that vLLM loads in each of its processes."""

import contextlib
import functools
import importlib
import time
from typing import Any

BACKEND = "jaxrl"
_LAGGARD = 60.0  # seconds for a worker that is slower than the one that failed
_NAP = 1e-4  # seconds; a step of the smallest model takes twenty times as long


def register() -> None:
    """Registers the bridge as a weight-transfer backend, whose engine is imported on first use, and
    the linear layers of `blocks=int8`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    with contextlib.suppress(ValueError):  # vLLM may load a plugin twice
        WeightTransferEngineFactory.register_engine(
            BACKEND, "jaxrl.bridge.in_vllm.engine", "BridgeEngine"
        )
    importlib.import_module("jaxrl.bridge.in_vllm.quantization")  # registers itself
    if current_platform.is_cpu():
        _nap_while_waiting()
        _permit_tiles()
    _read_all_answers()


def _nap_while_waiting() -> None:
    """Makes vLLM's engine and worker sleep while they wait for each other.

    They would spin, also for a second after each message, on cores that the learner needs.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(_NAP)


def _permit_tiles() -> None:
    """Asks Linux to let this process use tiles (AMX), if the processor has them.

    vLLM's attention in bf16 uses them without asking. Unless a large product has asked before, the
    worker ends with SIGILL at its first request.
    """
    from torch import cpu

    cpu._init_amx()


def _read_all_answers() -> None:
    """Makes vLLM read the answers of all workers to a call that fails in one.

    It would stop at the first failure, and take the answers left unread for those to the next call:
    after a refusal, the next publish would be refused for the same reason.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call: Any = MultiprocExecutor.collective_rpc
    if hasattr(call, "__wrapped__"):  # vLLM may load a plugin twice
        return

    @functools.wraps(call)
    def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
        queues = self.response_mqs
        noted = [_Noted(queue) for queue in queues]
        self.response_mqs = noted
        try:
            return call(self, *args, **kwargs)
        except RuntimeError:
            if any(one.read for one in noted) and kwargs.get("unique_reply_rank") is None:
                for one in noted:
                    with contextlib.suppress(TimeoutError, RuntimeError):  # late, or dead
                        one.read or one.dequeue(timeout=_LAGGARD)
            raise
        finally:
            self.response_mqs = queues

    MultiprocExecutor.collective_rpc = collective_rpc


class _Noted:
    """A queue that notes whether it was read."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.read = queue, False

    def dequeue(self, timeout: float | None = None) -> Any:
        self.read = True
        return self._queue.dequeue(timeout=timeout)

    def shutdown(self) -> None:
        """Wakes the reader. vLLM's monitor calls it when a worker has died, and only then tells the
        engine, whose death /health and the process's end report."""
        self._queue.shutdown()
