"""Threads that share a batch write every byte of every tensor once, and none after an error."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxrl.bridge import payload
from jaxrl.bridge.base import WeightSource
from jaxrl.bridge.manifest import ManifestEntry
from jaxrl.bridge.safetensors_file import plan_file
from tests.bridge.cases import ListSource


def write(source: WeightSource, out: Any, *, batch_bytes: int) -> tuple[ManifestEntry, ...]:
    """Writes to a stand-in for an array, whose `__setitem__` sees every part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "_BATCH_BYTES", batch_bytes)
        file = plan_file(source.specs())
        payload.write_tensors(source, file, out)
    return file.entries


@given(st.lists(st.integers(0, 700), max_size=20), st.sampled_from([1, 50, 1000, 1 << 20]))
def test_every_byte_is_written_once(sizes: list[int], batch_bytes: int) -> None:
    rng = np.random.default_rng(0)
    source = ListSource({f"t{i}": rng.random(n, np.float32) for i, n in enumerate(sizes)})
    nbytes = plan_file(source.specs()).nbytes
    found, times = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    class Counting:
        def __setitem__(self, where: slice, data: np.ndarray) -> None:
            found[where] = data
            times[where] += 1

    entries = write(source, Counting(), batch_bytes=batch_bytes)
    assert (times == 1).all()
    assert [entry.name for entry in entries] == list(source.tensors)
    for entry in entries:
        tensor = source.tensors[entry.name]
        assert found[entry.offset :][: tensor.nbytes].tobytes() == tensor.tobytes()


def test_source_error_stops_all_writers() -> None:
    class Broken(ListSource):
        def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
            yield from self.tensors.items()
            raise OSError("the device is gone")

    begun, ended = list[slice](), list[slice]()

    class Slow:
        def __setitem__(self, where: slice, data: np.ndarray) -> None:
            begun.append(where)
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.05)
            ended.append(where)

    with pytest.raises(OSError, match="the device is gone"):
        write(Broken({"a": np.ones(9, np.float32)}), Slow(), batch_bytes=1)
    assert len(begun) == len(ended) == 3  # the header and a half by each thread


def test_an_error_of_a_thread_is_raised() -> None:
    class Full:
        def __setitem__(self, where: slice, data: np.ndarray) -> None:
            if where.start > 100:
                raise OSError("no page")

    with pytest.raises(OSError, match="no page"):
        write(ListSource({"a": np.ones(300, np.float32)}), Full(), batch_bytes=1 << 20)
